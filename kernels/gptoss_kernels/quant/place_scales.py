"""Scales of rows in e4m3, put where the rows' tokens go: what the grouped GEMM needs of rows that it gathers itself.

The rows stay in the order of their tokens; only their scales, 92 of 2972 bytes at 2880 columns, are sorted by expert,
so that a tile's scales of one group lie side by side. Each program reads the scales of its rows, wherever they are, and
writes them in order: scattered reads of four bytes come out of the L2, scattered writes would keep it busy.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.overlap import OVERLAPPING, after_previous
from gptoss_kernels.quant.norm_quant import empty_scales


@triton.jit
def _place_scales_kernel(scale_ptr, token_of_ptr, out_ptr, scale_row_stride, scale_group_stride, out_group_stride,
                         COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr):
    """ROWS rows of the result, all their COUNT scale groups."""
    after_previous()
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_G)
    token = tl.load(token_of_ptr + row).to(tl.int64)
    real = (token >= 0)[:, None] & (group < COUNT)[None, :]
    scale = tl.load(scale_ptr + token[:, None] * scale_row_stride + group[None, :] * scale_group_stride, mask=real,
                    other=0.0)
    tl.store(out_ptr + row[:, None] + group[None, :].to(tl.int64) * out_group_stride, scale, mask=real)


def place_scales_config(groups: int) -> dict[str, int]:
    """Rows of a program of `_place_scales_kernel`, its block of `groups` scale groups, and its warps."""
    return {"ROWS": 32, "BLOCK_G": triton.next_power_of_2(groups), "num_warps": 4}


def place_scales(scale: torch.Tensor, token_of: torch.Tensor) -> torch.Tensor:
    """scale[token_of], column-major as `empty_scales`.

    scale: [T, G] fp32, any strides; T rows or more. token_of: [M] int32, contiguous, M a multiple of 32: row of `scale`
    for each row of the result (-1: none). Returns [M, G] fp32; rows without a token hold anything.
    """
    if scale.dim() != 2 or scale.dtype != torch.float32:
        raise ValueError(f"place_scales: scale is {scale.dtype} {list(scale.shape)}; fp32 [T, G] is needed")
    config = place_scales_config(scale.shape[1])
    if token_of.dim() != 1 or token_of.shape[0] % config["ROWS"] or not token_of.is_contiguous():
        raise ValueError(f"place_scales: token_of is {list(token_of.shape)}; one contiguous row of a multiple of "
                         f"{config['ROWS']} is needed")
    rows, groups = token_of.shape[0], scale.shape[1]
    out = empty_scales(rows, groups * 128, scale.device)
    _place_scales_kernel[(rows // config["ROWS"],)](scale, token_of, out, *scale.stride(), out.stride(1), COUNT=groups,
                                                    **config, **OVERLAPPING)
    return out
