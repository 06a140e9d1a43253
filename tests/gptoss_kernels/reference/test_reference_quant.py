"""MXFP4 and e4m3 against exact values and the definitions of the formats."""
import numpy as np
import pytest
import torch

from gptoss_kernels.reference.quant import (
    E4M3_MAX,
    dequantise_blocks,
    dequantise_groups,
    mxfp4_decode,
    quantise_groups,
)

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
CODES = bytes.fromhex("1032547698BADCFE") * 2


def block(codes: bytes, scale: int):
    return torch.tensor(list(codes), dtype=torch.uint8).view(1, 16), torch.tensor([scale], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("scale, factor", [(127, 1), (130, 8), (120, 2**-7)])
def test_all_codes(dtype, scale, factor):
    """Low nibble first; -0 keeps its sign."""
    got = mxfp4_decode(*block(CODES, scale), dtype)
    assert got.dtype == dtype and got.shape == (32,)
    assert got.tolist() == [sign * v * factor for sign in (1, -1) for v in VALUES] * 2
    assert torch.signbit(got).tolist() == ([False] * 8 + [True] * 8) * 2


@pytest.mark.parametrize("scale", [0, 1, 5, 252])
def test_every_scale_is_exact_in_fp32_and_bf16(scale):
    """2^(scale - 127) times a code, also where the scale or the product is subnormal in fp32 (2^-127, 2^-128)."""
    expected = np.array([sign * v for sign in (1, -1) for v in VALUES] * 2) * 2.0 ** (scale - 127)
    for dtype in (torch.float32, torch.bfloat16):
        assert np.array_equal(mxfp4_decode(*block(CODES, scale), dtype).double().numpy(), expected)


def test_groups_have_their_own_scale():
    blocks = torch.full((2, 3, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 128, 129], [126, 125, 124]], dtype=torch.uint8)
    got = mxfp4_decode(blocks, scales)
    assert got.shape == (2, 96)
    assert got.view(2, 3, 32)[:, :, 0].tolist() == [[1, 2, 4], [0.5, 0.25, 0.125]]
    assert (got.view(2, 3, 32) == got.view(2, 3, 32)[..., :1]).all()


@pytest.mark.parametrize("shape", [(3, 16), (2, 15), (1, 2, 16)])
def test_blocks_and_scales_must_fit(shape):
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4_decode(torch.zeros(shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8))


def test_block_scales_of_a_partial_last_block():
    """2880 rows have 23 scale rows of 128, the last one 64 high; the size is not worked out from the shapes (126)."""
    weight = torch.ones(2880, 32).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 24.0)[:, None]
    got = dequantise_blocks(weight, scales)
    assert got[:, 0].tolist() == [row // 128 + 1.0 for row in range(2880)]
    assert got[2879, 31] == 23


def test_block_scales_along_both_axes():
    weight = torch.ones(2, 200, 300).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).expand(2, 2, 3) * torch.tensor([1.0, 10.0]).view(2, 1, 1)
    got = dequantise_blocks(weight, scales)
    for e, factor in ((0, 1), (1, 10)):
        assert got[e, [0, 127, 128, 199]][:, [0, 128, 299]].tolist() == [
            [factor * x for x in row] for row in ([1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6])
        ]


def test_block_product_is_rounded_once():
    weight = torch.tensor([[1.125, 3.5, -0.875]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.0123456]])
    expected = (weight.double() * scale.double()).bfloat16()
    assert torch.equal(dequantise_blocks(weight, scale, dtype=torch.bfloat16), expected)
    assert not torch.equal(weight.bfloat16() * scale.bfloat16(), expected)


def test_wrong_block_scales():
    with pytest.raises(ValueError, match=r"scales \[22, 1\] for a weight \[2880, 32\]; \[23, 1\] are expected"):
        dequantise_blocks(torch.zeros(2880, 32).to(torch.float8_e4m3fn), torch.ones(22, 1))


@pytest.mark.parametrize("columns", [128, 192, 2880])
def test_groups_round_trip(columns):
    """The largest of a group lands on 448; every value is within half an e4m3 step: 2^-4 of itself or 2^-10 units."""
    x = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 6)[:, None]
    q, scale = quantise_groups(x)
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape
    assert scale.shape == (6, -(-columns // 128)) and scale.dtype == torch.float32
    got = dequantise_groups(q, scale)
    wide = scale.repeat_interleave(128, dim=1)[:, :columns]
    assert ((got - x).abs() <= torch.maximum(x.abs() * 2**-4, wide * 2**-10) * (1 + 1e-5)).all()
    for start in range(0, columns, 128):
        part = slice(start, min(start + 128, columns))
        assert (q[:, part].float().abs().amax(dim=1) == E4M3_MAX).all()


def test_a_zero_group():
    q, scale = quantise_groups(torch.zeros(2, 200))
    assert (q.float() == 0).all() and (scale == 1).all()


def test_groups_are_independent():
    x = torch.ones(1, 256)
    x[0, 200] = 1000.0
    _, scale = quantise_groups(x)
    assert scale[0].tolist() == pytest.approx([1 / 448, 1000 / 448])
