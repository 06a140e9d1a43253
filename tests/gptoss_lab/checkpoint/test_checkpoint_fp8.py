"""FP8 blocks: the table against fp64, exactness proven on the bytes, partial blocks, slices, measured errors."""
import pytest
import torch
from checkpoint_helpers import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.reference import quant
from gptoss_lab.checkpoint import fp8, fp8_table, mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.stored import Dense, Fp8, Mxfp4

CPU = torch.device("cpu")


def random_mxfp4(seed, rows, groups, low=110, high=117, zero_groups=0.1, lead=()):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*lead, rows, groups, 16), dtype=torch.uint8, generator=g)
    blocks[torch.rand(*lead, rows, groups, generator=g) < zero_groups] &= 0x88          # zeros of both signs
    scales = torch.randint(low, high + 1, (*lead, rows, groups), dtype=torch.uint8, generator=g)
    return blocks, scales


def nearest_fp8(blocks, scales):
    """The closed form in fp64, block by block: scale 2^(e_max - 6) over groups that are not zero, nearest e4m3
    value.
    """
    rows, groups = scales.shape
    values = quant.mxfp4_decode(blocks, scales, torch.float64)
    weight = torch.empty(rows, groups * 32, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(-(-rows // 128), -(-groups // 4))
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            r, k = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            used = values[r, k].unflatten(-1, (-1, 32)).abs().amax(-1) > 0
            exponents = scales[r, 4 * j : 4 * j + 4].int()[used] - 127
            scale = 2.0 ** (exponents.max().item() - 6) if len(exponents) else 1.0
            scale_inv[i, j] = scale
            weight[r, k] = (values[r, k] / scale).float().to(torch.float8_e4m3fn)
    return weight, scale_inv


def test_the_table_is_the_nearest_e4m3_value():
    values = torch.tensor(mxfp4.VALUES, dtype=torch.float64)
    for d, row in enumerate(fp8_table.code_bytes()):
        wanted = values * 2.0 ** (6 - d)
        got = torch.tensor(row, dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert same_bits(got, wanted.float().to(torch.float8_e4m3fn))
        assert torch.equal(got.double() == wanted, fp8_table.landed(CPU)[d])
    assert fp8_table.landed(CPU)[: fp8_table.EXACT_SPREAD + 1].all()
    assert not fp8_table.landed(CPU)[fp8_table.EXACT_SPREAD + 1].all()
    assert not got.view(torch.uint8).bitwise_and(0x7F).any(), "beyond the last row every code must be a zero"


@pytest.mark.parametrize("spread", [0, 3, 14, 15, 17, 22, 60])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 200), groups=st.integers(1, 7))
@settings(deadline=None, max_examples=12)
def test_conversion_is_the_closed_form(spread, seed, rows, groups):
    blocks, scales = random_mxfp4(seed, rows, groups, high=110 + spread)
    weight, scale_inv, report = fp8.from_mxfp4(blocks, scales)
    expected, expected_scales = nearest_fp8(blocks, scales)
    assert same_bits(weight, expected) and same_bits(scale_inv, expected_scales)
    exact = fp8.exact_blocks(blocks, scales, weight, scale_inv)
    assert report.blocks == exact.numel() and report.exact_blocks == int(exact.sum())
    before, after = quant.mxfp4_decode(blocks, scales), quant.dequantise_blocks(weight, scale_inv)
    assert bool(exact.all()) == same_bits(before, after)
    assert {(b.row, b.column) for b in report.wide if b.rounded} == {tuple(x) for x in (~exact).nonzero().tolist()}
    assert max((b.max_abs_error for b in report.wide), default=0.0) == float((before - after).abs().max())
    assert sum(b.rounded for b in report.wide) == int((before != after).sum())
    if spread <= 14:
        assert report.exact and not report.wide and torch.equal(before, after)


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=5)
def test_many_matrices_are_many_times_one(seed):
    blocks, scales = random_mxfp4(seed, 130, 5, lead=(2, 3), high=127)
    weight, scale_inv, report = fp8.from_mxfp4(blocks, scales)
    parts = [[fp8.from_mxfp4(blocks[i, j], scales[i, j]) for j in range(3)] for i in range(2)]
    assert weight.shape == (2, 3, 130, 160) and scale_inv.shape == (2, 3, 2, 2)
    for i in range(2):
        for j in range(3):
            assert same_bits(weight[i, j], parts[i][j][0]) and same_bits(scale_inv[i, j], parts[i][j][1])
    assert report.exact_blocks == sum(p[2].exact_blocks for row in parts for p in row)
    assert {b.expert for b in report.wide} <= set(range(6))


def test_long_strips_do_not_mix():
    """More rows than one strip of the CPU path, with a partial last block."""
    blocks, scales = random_mxfp4(5, 1100, 3)
    weight, scale_inv, _ = fp8.from_mxfp4(blocks, scales)
    expected, expected_scales = nearest_fp8(blocks, scales)
    assert same_bits(weight, expected) and same_bits(scale_inv, expected_scales)


def test_a_wide_block_may_be_exact():
    """Exactness is of the codes, not of the spread: 4 survives 17 exponents down, 0.5 does not survive 15."""
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    blocks[0], scales = 0x77, torch.tensor([[127], [110]], dtype=torch.uint8)
    blocks[1] = 0x66
    report = fp8.from_mxfp4(blocks, scales)[2]
    assert (report.exact, report.wide_blocks, report.wide[0].spread, report.wide[0].rounded) == (True, 1, 17, 0)
    blocks[1, 0, 3] = 0x16
    report = fp8.from_mxfp4(blocks, scales)[2]
    assert (report.exact, report.wide[0].rounded) == (False, 1)
    assert report.wide[0].max_abs_error == 0.5 * 2.0**-17
    assert "expert 0 block (0, 0) spread 17, 1 codes" in report.complaint()


def test_zero_groups_do_not_set_the_scale():
    blocks = torch.full((3, 1, 16), 0x77, dtype=torch.uint8)
    blocks[0] = 0x80
    scales = torch.tensor([[254], [120], [0]], dtype=torch.uint8)
    blocks[2] = 0x08
    weight, scale_inv, report = fp8.from_mxfp4(blocks, scales)
    assert scale_inv.item() == 2.0 ** (120 - 127 - 6) and report.exact and report.wide_blocks == 0
    assert torch.signbit(weight[0].float()).tolist() == [False, True] * 16
    assert torch.signbit(weight[2].float()).tolist() == [True, False] * 16


def test_a_block_of_zeros_has_the_scale_one():
    zeros = torch.zeros(1, 1, 16, dtype=torch.uint8), torch.full((1, 1), 77, dtype=torch.uint8)
    assert fp8.from_mxfp4(*zeros)[1].item() == 1.0
    assert fp8.quantise(torch.zeros(4, 4), "amax")[1].item() == fp8.quantise(torch.zeros(4, 4))[1].item() == 1.0


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_extreme_scale_bytes_keep_their_exponent(byte):
    blocks = torch.full((1, 1, 16), 0x21, dtype=torch.uint8)
    weight, scale_inv, report = fp8.from_mxfp4(blocks, torch.full((1, 1), byte, dtype=torch.uint8))
    assert report.exact and scale_inv.double().item() == 2.0 ** (byte - 133)
    assert weight.double()[0, :2].tolist() == [32.0, 64.0]


def test_2880_rows_have_23_scale_rows():
    """The block size is 128, whatever the shapes suggest: ceil(2880 / 23) would be 126."""
    assert fp8.scale_shape(2880, 2880) == (23, 23)
    weight = torch.ones(2880, 1).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 24, dtype=torch.float32)[:, None]
    values = fp8.dequantise(weight, scale)[:, 0]
    assert values[:128].unique().tolist() == [1] and values[128:256].unique().tolist() == [2]
    assert values[-64:].unique().tolist() == [23] and values[-65] == 22
    with pytest.raises(CheckpointError, match=r"\[23, 1\] is expected"):
        fp8.dequantise(weight, scale[:22])


@pytest.mark.parametrize("kind", ["pow2", "amax"])
def test_the_last_block_ignores_padding(kind):
    """A scale depends only on what is inside the 64 rows and columns that exist."""
    g = torch.Generator().manual_seed(2)
    values = torch.randn(192, 192, generator=g)
    values[128:, 128:] *= 2.0**-9
    scale = fp8.quantise(values, kind)[1]
    corner = values[128:, 128:].abs().max()
    assert 224 < (corner / scale[1, 1]).item() <= 448 * (1 + 1e-6)
    assert same_bits(fp8.quantise(values[128:, 128:], kind)[1], scale[1:, 1:])


@pytest.mark.parametrize("kind", ["pow2", "amax"])
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-30, 30))
@settings(deadline=None, max_examples=15)
def test_quantise_rounds_to_nearest_and_measures_it(kind, seed, power):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(150, 140, generator=g) * 2.0**power
    weight, scale_inv, report = fp8.quantise(values, kind)
    after = quant.dequantise_blocks(weight, scale_inv, dtype=torch.float64)
    error = (after - values.double()).abs()
    assert report.max_abs_error == pytest.approx(float(error.max()), rel=1e-6)
    wanted = float(error.square().sum().sqrt() / values.double().square().sum().sqrt())
    assert report.relative_rms_error == pytest.approx(wanted, rel=1e-6) and 0.01 < wanted < 0.04
    wide = scale_inv.double().repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :140]
    all_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = all_values[all_values.isfinite()].unique()
    nearest = (values.double()[..., None] / wide[..., None] - grid).abs().amin(-1) * wide
    assert torch.all(error <= nearest * (1 + 1e-5))
    if kind == "pow2":
        assert torch.equal(torch.frexp(scale_inv).mantissa, torch.full_like(scale_inv, 0.5))
        amax = values[:128, :128].abs().max()
        assert amax <= 448 * scale_inv[0, 0] and amax > 224 * scale_inv[0, 0]


@pytest.mark.parametrize("amax", [448.0, 448.5, 440.0, 424.0, 225.0, 224.0, 1.0, 0.8750001, 0.875, 2.0**-130, 3e38])
def test_power_of_two_scale_at_the_edges(amax):
    """The smallest power of two that keeps the largest value within 448."""
    scale = fp8.quantise(torch.tensor([[amax, 0.0]]))[1].double().item()
    amax = torch.tensor(amax, dtype=torch.float32).double().item()
    assert amax / scale <= 448 < amax / (scale / 2)


def test_values_that_came_from_mxfp4_quantise_exactly():
    """bf16 made from MXFP4 gets the same FP8 as the table gives, where each block holds a code of 4 or 6."""
    blocks, scales = random_mxfp4(4, 256, 8, zero_groups=0)
    blocks[..., 0] |= 6
    by_table, by_rounding = fp8.from_mxfp4(blocks, scales), fp8.quantise(mxfp4.decode(blocks, scales, torch.bfloat16))
    assert by_rounding[2].exact
    assert same_bits(by_table[0], by_rounding[0]) and same_bits(by_table[1], by_rounding[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_ranks_of_a_2880_axis(dtype):
    """360 rows a rank do not end at blocks: a slice takes every block it touches and decodes to the slice of the
    whole.
    """
    g = torch.Generator().manual_seed(8)
    weight = torch.randn(2880, 256, generator=g).to(torch.float8_e4m3fn)
    whole = Fp8(weight, torch.rand(23, 2, generator=g))
    full = whole.dequantise(dtype)
    blocks = [(0, 2), (2, 5), (5, 8), (8, 11), (11, 14), (14, 16), (16, 19), (19, 22)]
    for rank, (first, last) in enumerate(blocks):
        part = whole.slice_rows(360 * rank, 360 * (rank + 1))
        assert same_bits(part.scale_inv, whole.scale_inv[first : last + 1])
        assert same_bits(part.dequantise(dtype), full[360 * rank : 360 * (rank + 1)])
        again = part.slice_rows(100, 300)
        assert same_bits(again.dequantise(dtype), full[360 * rank + 100 : 360 * rank + 300])
    turned = Fp8(weight.T.contiguous(), whole.scale_inv.T.contiguous())
    part = turned.slice_columns(360, 720).slice_columns(7, 200)
    assert same_bits(part.dequantise(dtype), full.T[:, 367:560])


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_slices_of_every_form_are_slices_of_the_whole(data):
    blocks, scales = random_mxfp4(data.draw(st.integers(0, 99)), 150, 5, lead=(2,))
    weight, scale_inv, _ = fp8.from_mxfp4(blocks, scales)
    full = mxfp4.decode(blocks, scales)
    r0, r1 = sorted(data.draw(st.tuples(st.integers(0, 150), st.integers(0, 150))))
    k0, k1 = sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))
    turned = Dense(full.transpose(1, 2).contiguous(), "in_out")
    for form in (Mxfp4(blocks, scales), Fp8(weight, scale_inv), Dense(full), turned):
        assert form.shape == (2, 150, 160)
        part = form.slice_rows(r0, r1).slice_columns(32 * k0, 32 * k1)
        assert part.shape == (2, r1 - r0, 32 * (k1 - k0))
        assert torch.equal(part.dequantise(torch.float32), full[:, r0:r1, 32 * k0 : 32 * k1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp8.quantise(torch.ones(2, 2), "mean"), "'mean'; one of pow2, amax"),
        (lambda: fp8.quantise(torch.tensor([[1.0, float("nan")]]), where="q_proj"), "q_proj: NaN or infinity"),
        (lambda: fp8.quantise(torch.tensor([[1.0, float("inf")]]), "amax"), "NaN or infinity"),
        (lambda: fp8.quantise(torch.ones(2, 2, dtype=torch.uint8)), "need floats"),
        (lambda: fp8.from_mxfp4(*random_mxfp4(0, 4, 2, 255, 255), where="expert 1"), "expert 1: scale byte 255"),
        (lambda: fp8.dequantise(torch.ones(2, 2), torch.ones(1, 1)), "float8_e4m3fn"),
        (lambda: Mxfp4(*random_mxfp4(0, 4, 2)).slice_columns(16, 32), "multiples of 32"),
        (lambda: Dense(torch.ones(2, 2)).slice_rows(1, 3), r"rows 1..3 do not lie within 0..2"),
    ],
)
def test_bad_input_is_one_line(call, words):
    with pytest.raises(CheckpointError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
