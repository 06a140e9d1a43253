"""Number formats of the project, in plain torch: MXFP4 groups, e4m3 in 1x128 groups, e4m3 in 128x128 blocks.

MXFP4 (OCP): 4-bit codes (sign, two exponent bits, one mantissa bit) in groups of 32 along the input axis, one power of
two per group. In a byte the low nibble is the earlier element. e4m3: 448 is the largest value, no infinities.
"""
from __future__ import annotations

from typing import NamedTuple

import torch

E4M3_MAX = 448.0
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Quantised(NamedTuple):
    """Rows in e4m3: values [rows, H] float8_e4m3fn, scale [rows, ceil(H / 128)] fp32, one of each 128 columns; a row is
    values * scale. Rows may be more than were asked for, to the end of a tile; nothing is in those."""

    values: torch.Tensor
    scale: torch.Tensor


def mxfp4_decode(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """blocks [..., G, 16] uint8, scales [..., G] uint8 (2^(s-127)) -> [..., 32 G]. -0 keeps its sign.

    Exact in bf16 for every scale byte up to 252 and in fp32 for all but the subnormal fringe; 255 is NaN in the format.
    """
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(f"mxfp4_decode: blocks {list(blocks.shape)} and scales {list(scales.shape)} do not belong "
                         "together; [..., G, 16] and [..., G] are expected")
    wide = torch.promote_types(dtype, torch.float32)
    byte = torch.arange(256, device=blocks.device)
    value = torch.tensor(MXFP4_VALUES, dtype=wide, device=blocks.device)
    pair = torch.stack([value[byte & 15], value[byte >> 4]], dim=-1)             # [256, 2]: both nibbles, low first
    power = torch.ldexp(torch.ones(256, dtype=torch.float64, device=blocks.device), byte - 127).to(wide)
    values = pair[blocks.int()].flatten(-2)                                      # [..., G, 32]
    return (values * power[scales.int()][..., None]).to(dtype).flatten(-2)


def quantise_groups(x: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with one fp32 scale per row and `group` columns: scale = amax / 448 (1 for an all-zero group).

    x: [R, K]. Returns q [R, K] float8_e4m3fn and scale [R, ceil(K / group)] fp32, x ~ q * scale. The last group may be
    shorter.
    """
    rows, k = x.shape
    count = -(-k // group)
    padded = torch.nn.functional.pad(x.float(), (0, count * group - k)).view(rows, count, group)
    amax = padded.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    q = (padded / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return q.view(torch.uint8).view(rows, count * group)[:, :k].contiguous().view(torch.float8_e4m3fn), scale


def quantise_into(x: torch.Tensor, room: Quantised) -> None:
    """`quantise_groups` of x [T, H] in groups of 128, into the first T rows of room; the others keep what they held."""
    for part, made in zip(room, quantise_groups(x), strict=True):
        part[: x.shape[0]] = made


def dequantise_groups(
    q: torch.Tensor, scale: torch.Tensor, group: int = 128, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The inverse of `quantise_groups`: q [R, K] e4m3, scale [R, ceil(K / group)] -> [R, K] in dtype."""
    wide = scale.to(dtype).repeat_interleave(group, dim=-1)[..., : q.shape[-1]]
    return q.to(dtype) * wide


def dequantise_blocks(
    weight: torch.Tensor, scale_inv: torch.Tensor, block: int = 128, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """weight [..., N, K] e4m3 and scale_inv [..., ceil(N / block), ceil(K / block)] fp32 -> [..., N, K] in dtype.

    The product is taken in fp32 at least and rounded once (a scale rounded to bf16 first would be off by up to 0.4 %).
    The block size is given, never worked out from the shapes: 2880 rows have 23 scale rows, and 2880 / 23 is not 128.
    """
    n, k = weight.shape[-2:]
    if scale_inv.shape[-2:] != (-(-n // block), -(-k // block)):
        raise ValueError(f"dequantise_blocks: scales {list(scale_inv.shape[-2:])} for a weight [{n}, {k}]; "
                         f"[{-(-n // block)}, {-(-k // block)}] are expected")
    wide = torch.promote_types(dtype, torch.float32)
    scale = scale_inv.to(wide).repeat_interleave(block, dim=-2)[..., :n, :]
    return (weight.to(wide) * scale.repeat_interleave(block, dim=-1)[..., :k]).to(dtype)
