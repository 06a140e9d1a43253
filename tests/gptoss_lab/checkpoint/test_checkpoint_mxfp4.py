"""The MXFP4 codec against closed forms in Python's exact arithmetic, the plain reference and transformers."""
import itertools
from fractions import Fraction

import pytest
import torch
from checkpoint_helpers import same_bits, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.reference import quant
from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.powers import power_of_two, power_of_two_fp32

MAGNITUDES = [Fraction(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
SEEDS = st.integers(0, 2**32 - 1)


def random_mxfp4(seed, shape=(3, 5), low=0, high=252):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=g)
    return blocks, torch.randint(low, high + 1, shape, dtype=torch.uint8, generator=g)


def test_all_sixteen_codes_in_order():
    """Low nibble first, subnormal and zero right, the sign of -0 kept; three exponents up is times eight."""
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)[None]
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2)
    for byte, factor in ((127, 1), (130, 8)):
        got = mxfp4.decode(blocks, torch.tensor([byte], dtype=torch.uint8))
        assert same_bits(got, expected * factor)
        assert torch.signbit(got[8]) and not torch.signbit(got[0])


def test_the_example_byte():
    blocks = torch.full((1, 16), 0x7A, dtype=torch.uint8)
    assert mxfp4.decode(blocks, torch.tensor([127], dtype=torch.uint8))[:2].tolist() == [-1.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("byte", [0, 1, 2, 22, 126, 127, 128, 251, 252])
def test_decode_is_exact(byte, dtype):
    """Every code at every kind of scale, against whole-number arithmetic, also where the results are subnormal."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = mxfp4.decode(blocks, torch.full((16,), byte, dtype=torch.uint8), dtype)
    for value, code in zip(got.flatten().tolist(), itertools.chain.from_iterable((b & 15, b >> 4) for b in range(256)),
                           strict=True):
        assert abs(Fraction(value)) == MAGNITUDES[code & 7] * Fraction(2) ** (byte - 127)
        assert value <= 0 if code & 8 else value >= 0


@given(SEEDS)
@settings(deadline=None, max_examples=30)
def test_decode_equals_the_plain_reference(seed):
    blocks, scales = random_mxfp4(seed, (2, 7, 3), low=1)
    for dtype in (torch.float32, torch.bfloat16):
        assert same_bits(mxfp4.decode(blocks, scales, dtype), quant.mxfp4_decode(blocks, scales, dtype))


def test_decode_equals_transformers():
    convert_moe_packed_tensors = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    tensors = tensors_of("hf")
    for projection in ("gate_up_proj", "down_proj"):
        blocks, scales = (tensors[f"model.layers.1.mlp.experts.{projection}_{part}"] for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(blocks, scales)                     # [E, in, out]
        assert torch.equal(mxfp4.decode(blocks, scales, torch.bfloat16), theirs.transpose(1, 2))


@given(SEEDS)
@settings(deadline=None, max_examples=50)
def test_values_come_back_exactly(seed):
    blocks, scales = random_mxfp4(seed)
    values = mxfp4.decode(blocks, scales)
    again = mxfp4.encode(values)
    assert same_bits(mxfp4.decode(*again), values)


@given(SEEDS)
@settings(deadline=None, max_examples=50)
def test_canonical_bytes_come_back_exactly(seed):
    """Where every group has a code of 4 or 6, encoding gives the very bytes, sign of zero included."""
    blocks, scales = random_mxfp4(seed)
    blocks[..., seed % 16] |= 0x06
    again = mxfp4.encode(mxfp4.decode(blocks, scales))
    assert torch.equal(again[0], blocks) and torch.equal(again[1], scales)


def test_a_group_that_is_not_canonical_keeps_its_values_with_another_scale():
    blocks = torch.full((1, 16), 0x11, dtype=torch.uint8)                       # all 0.5
    new_blocks, new_scales = mxfp4.encode(mxfp4.decode(blocks, torch.tensor([127], dtype=torch.uint8)))
    assert new_scales.item() == 124 and new_blocks.unique().tolist() == [0x66]  # 4 * 2^-3


def nearest_even_code(value: Fraction) -> int:
    """The code of the nearest magnitude; of two as near, the even code. Exhaustive, in exact arithmetic."""
    return min(range(8), key=lambda code: (abs(abs(value) - MAGNITUDES[code]), code & 1))


def closed_form_scale(largest: Fraction) -> int:
    """ceil(log2(largest / 6)), by search."""
    return next(e for e in range(-127, 128) if largest <= 6 * Fraction(2) ** e)


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=32, max_size=32))
@settings(deadline=None, max_examples=150)
def test_encode_is_the_nearest_code(values):
    blocks, scales = mxfp4.encode(torch.tensor(values, dtype=torch.float32))
    exponent = closed_form_scale(max(abs(Fraction(v)) for v in values))
    assert scales.item() - 127 == exponent
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten().tolist()
    for value, code in zip(values, codes, strict=True):
        assert code & 7 == nearest_even_code(Fraction(value) / Fraction(2) ** exponent)
        assert code >> 3 == torch.signbit(torch.tensor(value)).item()


def test_encode_ties_go_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    group = torch.tensor([*ties, *(-x for x in ties), 6.0] + [0.0] * 17)
    blocks, scales = mxfp4.encode(group)
    expected = [0, 1, 1, 2, 2, 4, 4]
    got = mxfp4.decode(blocks, scales)
    assert scales.item() == 127
    assert got[:7].tolist() == expected and got[7:14].tolist() == [-x for x in expected]


@pytest.mark.parametrize(
    ("largest", "byte"),
    [(6.0, 127), (6.0000005, 128), (3.0, 126), (3.0000002, 127), (4.0, 127), (2.0**-149, 0), (2.0**127, 252), (0.0, 0)],
)
def test_scale_at_the_edges(largest, byte):
    group = torch.zeros(32)
    group[5] = largest
    blocks, scales = mxfp4.encode(group)
    assert scales.item() == byte
    assert largest < 2.0**-120 or abs(mxfp4.decode(blocks, scales)[5] / largest - 1) < 0.34


def test_encode_takes_bf16_and_any_shape():
    values = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    blocks, scales = mxfp4.encode(values.to(torch.bfloat16))
    assert blocks.shape == (2, 3, 2, 16) and scales.shape == (2, 3, 2)
    assert same_bits(blocks, mxfp4.encode(values.to(torch.bfloat16).float())[0])


def test_views_that_are_not_contiguous_decode_alike():
    blocks, scales = random_mxfp4(3, (4, 6))
    cut = mxfp4.decode(blocks[1:3, ::2], scales[1:3, ::2])
    assert same_bits(cut, mxfp4.decode(blocks, scales).view(4, 6, 32)[1:3, ::2].flatten(-2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b, s: mxfp4.decode(b, s.fill_(255), where="expert 3"), "expert 3: scale byte 255"),
        (lambda b, s: mxfp4.decode(b, s[:, :-1]), "do not belong together"),
        (lambda b, s: mxfp4.decode(b.int(), s), "uint8"),
        (lambda b, s: mxfp4.decode(b, s, torch.float16), "float16"),
        (lambda b, s: mxfp4.decode(b.fill_(0x77), s.fill_(254)), "254 puts values beyond"),
        (lambda b, s: mxfp4.encode(torch.ones(2, 33)), "multiple of 32"),
        (lambda b, s: mxfp4.encode(torch.ones(32, dtype=torch.int32)), "floats"),
        (lambda b, s: mxfp4.encode(torch.full((32,), float("nan")), "w"), "w: NaN or infinity"),
        (lambda b, s: mxfp4.encode(torch.full((32,), -float("inf"))), "NaN or infinity"),
    ],
)
def test_bad_input_is_one_line(call, words):
    with pytest.raises(CheckpointError, match=words) as error:
        call(*random_mxfp4(0))
    assert "\n" not in str(error.value)


def test_a_nan_scale_is_found_wherever_it_is():
    blocks, scales = random_mxfp4(1)
    scales[2, 4] = 255
    with pytest.raises(CheckpointError, match=r"index \[2, 4\]"):
        mxfp4.decode(blocks, scales)


def test_powers_of_two_are_exact():
    exponents = list(range(-1022, 1024))
    assert power_of_two(torch.tensor(exponents)).tolist() == [2.0**e for e in exponents]
    exponents = list(range(-149, 128))
    assert power_of_two_fp32(torch.tensor(exponents)).double().tolist() == [2.0**e for e in exponents]
