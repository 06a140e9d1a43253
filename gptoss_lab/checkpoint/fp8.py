"""FP8 weights: e4m3 values with one fp32 scale per 128x128 block, made from MXFP4 without rounding.

From MXFP4 the scale of a block is 2^(e_max - 6), e_max the largest exponent of a group that is not all zeros. Every
value whose group lies within 14 exponents of e_max then is an e4m3 value, and conversion is a look-up on bytes
(`fp8_table`): no float in between, the same on every device. A block counts as exact when each of its codes landed on
its value; wider blocks are looked at code by code, since a code of 4 or a zero survives where 0.5 does not.
`exact_blocks` proves the same independently, by decoding both sides.

From floats (attention weights, or any weight with the usual amax / 448 scales) values are rounded to nearest, and the
error is measured. The last block of 2880 is 64 wide: its amax sees no padding, and it has a scale like any other
(2880 rows have 23 scale rows).
"""
from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.fp8_table import EXACT_SPREAD, LAST, TOP_EXPONENT, code_bytes, four_codes, landed
from gptoss_lab.checkpoint.lookup import aligned, lookup
from gptoss_lab.checkpoint.powers import power_of_two, power_of_two_fp32
from gptoss_lab.checkpoint.report import BlockReport, RoundingReport, WideBlock

BLOCK = 128
E4M3_MAX = 448.0
SCALES = ("pow2", "amax")
_GROUPS = BLOCK // mxfp4.GROUP          # MXFP4 groups per block row: 4
_BIAS = 127                             # of the MXFP4 scale byte
_STRIP = 4 * BLOCK                      # rows converted at a time on the CPU, so that temporaries stay in the cache


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """(ceil(rows / 128), ceil(columns / 128))."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def from_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, where: str = "MXFP4 tensor"
) -> tuple[torch.Tensor, torch.Tensor, BlockReport]:
    """FP8 blocks of MXFP4 data, by table.

    blocks: [..., N, G, 16] uint8. scales: [..., N, G] uint8. Returns weight [..., N, 32 G] float8_e4m3fn, scale_inv
    [..., ceil(N / 128), ceil(32 G / 128)] fp32 (2^(e_max - 6); 1 for a block of zeros) and the report. Same device.
    CheckpointError for shapes that do not belong together and for a scale byte 255.
    """
    mxfp4.check(blocks, scales, where)
    *lead, rows, groups = scales.shape
    weight = torch.empty((*lead, rows, groups * mxfp4.GROUP), dtype=torch.uint8, device=blocks.device)
    height, width = scale_shape(rows, groups * mxfp4.GROUP)
    codes, exponents = aligned(blocks).view(-1, rows, groups, 16), scales.reshape(-1, rows, groups)
    tops = torch.empty((len(codes), height, width), dtype=torch.int16, device=blocks.device)
    spreads = torch.empty_like(tops)
    step = _STRIP if blocks.device.type == "cpu" else height * BLOCK
    for index, out in enumerate(weight.view(-1, rows, groups * mxfp4.GROUP)):
        for first in range(0, rows, step):
            strip, place = slice(first, first + step), (index, slice(first // BLOCK, (first + step) // BLOCK))
            tops[place], spreads[place] = _strip(codes[index, strip], exponents[index, strip], out[strip])
    power = torch.where(tops >= 0, tops - (_BIAS + TOP_EXPONENT), torch.zeros_like(tops))
    scale_inv = power_of_two_fp32(power).view(*lead, height, width)
    return weight.view(torch.float8_e4m3fn), scale_inv, _report(codes, exponents, tops, spreads)


def quantise(
    values: torch.Tensor, scales: str = "pow2", where: str = "tensor"
) -> tuple[torch.Tensor, torch.Tensor, RoundingReport]:
    """FP8 blocks of floats, nearest value, ties to even, with the measured error.

    values: [..., N, K] float, finite. scales: "amax" (block amax / 448) or "pow2" (the smallest power of two that
    keeps the block within 448). An all-zero block has the scale 1. Returns weight, scale_inv as `from_mxfp4`, and the
    report.
    """
    if scales not in SCALES:
        raise CheckpointError(f"no FP8 scales {scales!r}; one of {', '.join(SCALES)} is expected")
    if values.dim() < 2 or not values.is_floating_point():
        raise CheckpointError(f"{where}: FP8 blocks need floats [..., N, K], not {values.dtype} {list(values.shape)}")
    *lead, rows, columns = values.shape
    weight = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    height, width = scale_shape(rows, columns)
    scale_inv = torch.empty((math.prod(lead), height, width), dtype=torch.float32, device=values.device)
    report = RoundingReport()
    parts = zip(values.reshape(-1, rows, columns), weight.view(-1, rows, columns), strict=True)
    for index, (value, out) in enumerate(parts):
        for block_row, first in enumerate(range(0, rows, BLOCK)):
            strip = value[first : first + BLOCK].float()
            scale = _float_scales(strip, scales, where)
            wide = scale.repeat_interleave(BLOCK)[:columns]
            out[first : first + BLOCK] = (strip / wide).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            report.measure(strip, out[first : first + BLOCK].float() * wide)
            scale_inv[index, block_row] = scale
    return weight, scale_inv.view(*lead, height, width), report


def dequantise(
    weight: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32, first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """weight * its block's scale, the product in fp32 and rounded once to `dtype`.

    weight: [..., N, K] float8_e4m3fn. scale_inv: fp32, one per block touched: [..., ceil((first_row + N) / 128),
    ceil((first_column + K) / 128)]. first_row, first_column: offset of the weight inside its first block, 0..127.
    """
    rows, columns = weight.shape[-2:]
    expected = (*weight.shape[:-2], *scale_shape(first_row + rows, first_column + columns))
    if weight.dtype != torch.float8_e4m3fn or scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != expected:
        raise CheckpointError(f"FP8 weight {weight.dtype} {list(weight.shape)} with scales {scale_inv.dtype} "
                              f"{list(scale_inv.shape)}; float8_e4m3fn with float32 {list(expected)} is expected")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for number in range(expected[-2]):
        start, stop = max(0, number * BLOCK - first_row), min(rows, (number + 1) * BLOCK - first_row)
        wide = scale_inv[..., number, :].repeat_interleave(BLOCK, dim=-1)[..., first_column : first_column + columns]
        out[..., start:stop, :] = weight[..., start:stop, :].float() * wide[..., None, :]
    return out


def exact_blocks(
    blocks: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor
) -> torch.Tensor:
    """Prove a conversion on its bytes: decode both sides to fp32 and compare the bits, block by block.

    Arguments as `from_mxfp4` takes and gives them, without leading axes or with equal ones. Returns bool [..., ceil(N
    / 128), ceil(K / 128)]. Independent of the conversion's table, and several times as much work as the conversion.
    """
    before = mxfp4.decode(blocks, scales).view(torch.int32)
    after = dequantise(weight, scale_inv).view(torch.int32)
    rows, columns = before.shape[-2:]
    height, width = scale_shape(rows, columns)
    same = F.pad(before == after, (0, width * BLOCK - columns, 0, height * BLOCK - rows), value=True)
    return same.unflatten(-1, (width, BLOCK)).all(-1).unflatten(-2, (height, BLOCK)).all(-2)


# -- parts of from_mxfp4 -----------------------------------------------------------------------------------------------
def _strip(code: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert whole block rows. code [n, G, 16], scale [n, G]; fills out [n, 32 G] uint8.

    Returns e_max (-1: only zeros) and spread of each block, both [block rows, block columns] int16.
    """
    rows, groups = scale.shape
    words = code.view(torch.int64)                                                          # [n, G, 2]
    used = (words[..., 0] | words[..., 1]) & 0x7777777777777777 != 0                        # [n, G]
    exponent = scale.to(torch.int16)
    top = _per_block(torch.where(used, exponent, -1), -1).amax(dim=(1, 3))
    low = _per_block(torch.where(used, exponent, 256), 256).amin(dim=(1, 3))
    below = (_per_group(top, rows, groups) - exponent).clamp_(0, LAST)                      # [n, G]
    sixteen_bits, four_values = code.view(torch.int16).view(-1, 8), out.view(torch.int32).view(-1, 8)
    lookup(four_codes(code.device), below.view(-1), sixteen_bits, four_values)
    return top, torch.where(top >= 0, top - low, torch.zeros_like(top))


def _per_block(groups: torch.Tensor, fill: int) -> torch.Tensor:
    """[n, G] -> [block rows, 128, block columns, 4], padded with `fill`."""
    rows, columns = groups.shape
    height, width = -(-rows // BLOCK), -(-columns // _GROUPS)
    padded = F.pad(groups, (0, width * _GROUPS - columns, 0, height * BLOCK - rows), value=fill)
    return padded.view(height, BLOCK, width, _GROUPS)


def _per_group(blocks: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """[block rows, block columns] -> [rows, groups], each block's value at its groups."""
    return blocks.repeat_interleave(_GROUPS, dim=1)[:, :groups].repeat_interleave(BLOCK, dim=0)[:rows]


def _report(
    codes: torch.Tensor, exponents: torch.Tensor, tops: torch.Tensor, spreads: torch.Tensor
) -> BlockReport:
    """Every block of at most 14 is exact by the table; the others are looked at code by code."""
    counts = torch.bincount(spreads.flatten().int(), minlength=256).tolist()
    wide = []
    for index, row, column in (spreads > EXACT_SPREAD).nonzero().tolist() if any(counts[EXACT_SPREAD + 1 :]) else ():
        place = (index, slice(row * BLOCK, (row + 1) * BLOCK), slice(column * _GROUPS, (column + 1) * _GROUPS))
        rounded, error = _changes(codes[place], exponents[place].to(torch.int16), tops[index, row, column])
        wide.append(WideBlock(index, row, column, int(spreads[index, row, column]), rounded, error))
    inexact = sum(block.rounded > 0 for block in wide)
    return BlockReport(spreads.numel(), spreads.numel() - inexact, wide, counts, len(wide))


def _changes(code: torch.Tensor, exponent: torch.Tensor, top: torch.Tensor) -> tuple[int, float]:
    """(codes that did not land on their value, largest error of a weight) of one block; code [n, g, 16], exponent [n,
    g].
    """
    nibbles = torch.stack([code & 15, code >> 4], dim=-1).flatten(-2).long()                # [n, g, 32]
    below = (top - exponent).clamp(0, LAST)[..., None].long()
    result, value = _values(code.device)
    after = result[below, nibbles] * power_of_two(top - (_BIAS + TOP_EXPONENT))
    before = value[nibbles] * power_of_two(exponent - _BIAS)[..., None]
    return int((~landed(code.device)[below, nibbles]).sum()), float((after - before).abs().max())


@functools.cache
def _values(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the table gives, [20, 16], and what the codes mean, [16], in fp64."""
    result = torch.tensor(code_bytes(), dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return result.to(device), torch.tensor(mxfp4.VALUES, dtype=torch.float64, device=device)


def _float_scales(strip: torch.Tensor, kind: str, where: str) -> torch.Tensor:
    """strip [n <= 128, K] fp32 -> scales [ceil(K / 128)] fp32."""
    columns = strip.shape[1]
    width = -(-columns // BLOCK)
    amax = F.pad(strip.abs().amax(dim=0), (0, width * BLOCK - columns)).view(width, BLOCK).amax(dim=1)
    if not bool(torch.isfinite(amax).all()):
        raise CheckpointError(f"{where}: NaN or infinity cannot be written as FP8")
    if kind == "amax":
        scale = amax / E4M3_MAX
    else:
        fraction, exponent = torch.frexp(amax)              # 448 = 0.875 * 2^9
        scale = power_of_two_fp32((exponent - 9 + (fraction > 0.875)).clamp_(min=-149))
    return torch.where((amax > 0) & (scale > 0), scale, torch.ones_like(scale))
