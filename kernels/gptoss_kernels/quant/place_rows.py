"""Rows that are in e4m3 already, copied to the places of the experts that a token goes to.

What `norm_quantise` does with `row_of` for rows that come from elsewhere: each row is read once and written to all its
places, since with half of the experts here a token has two of them on average; a gather by place would read each row as
often as it is written.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.overlap import OVERLAPPING, after_previous
from gptoss_kernels.quant.norm_quant import Quantised, empty_quantised, places


@triton.jit
def _place_rows_kernel(q_ptr, scale_ptr, row_of_ptr, out_ptr, out_scale_ptr, scale_row_stride, scale_group_stride,
                       out_row_stride, out_group_stride, H: tl.constexpr, COPIES: tl.constexpr, BLOCK_H: tl.constexpr,
                       BLOCK_G: tl.constexpr):
    """One token by one program. H, BLOCK_H: in words of four codes."""
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    rows = places(token, row_of_ptr, COPIES, True)
    h, group = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_G)
    groups: tl.constexpr = (H + 31) // 32
    words = tl.load(q_ptr + token * H + h, mask=h < H, other=0)
    scale = tl.load(scale_ptr + token * scale_row_stride + group * scale_group_stride, mask=group < groups, other=0.0)
    for c in tl.static_range(COPIES):
        row = rows[c].to(tl.int64)
        tl.store(out_ptr + row * H + h, words, mask=(h < H) & (row >= 0))
        tl.store(out_scale_ptr + row * out_row_stride + group * out_group_stride, scale,
                 mask=(group < groups) & (row >= 0))


def place_rows_config(columns: int) -> dict[str, int]:
    """Blocks of a program of `_place_rows_kernel` and its warps, for rows of so many columns."""
    words = -(-columns // 4)
    return {"BLOCK_H": triton.next_power_of_2(words), "BLOCK_G": triton.next_power_of_2(-(-words // 32)),
            "num_warps": 4 if words > 256 else 2}


def place_rows(x: Quantised, row_of: torch.Tensor, rows: int) -> Quantised:
    """x: at least T rows of H columns, H a multiple of 4, scales with any strides. row_of: [T, k] int32, rows of the
    result that receive this token (-1: nowhere). Returns `rows` rows; those that nobody was sent to hold anything.
    """
    t, top = row_of.shape
    h = x.values.shape[1]
    if x.values.shape[0] < t or h % 4 or not (x.values.is_contiguous() and row_of.is_contiguous()):
        raise ValueError(f"place_rows: x is {list(x.values.shape)} and row_of {[t, top]}; at least {t} rows of a "
                         "multiple of 4 columns, both contiguous, are needed")
    made = empty_quantised(rows, h, x.values.device)
    _place_rows_kernel[(t,)](
        x.values.view(torch.int32), x.scale, row_of, made.values.view(torch.int32), made.scale, *x.scale.stride(),
        *made.scale.stride(), H=h // 4, COPIES=top, **place_rows_config(h), **OVERLAPPING)
    return made
