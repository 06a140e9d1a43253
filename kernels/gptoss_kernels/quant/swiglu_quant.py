"""Bias, clamped SwiGLU and e4m3 quantisation of a finished GEMM output: for a GEMM that fuses nothing.

A vendor's grouped GEMM has no bias and no epilogue. Its output is read here once anyway, so the bias rides along.
Columns are interleaved: even ones gate (clamped from above), odd ones up (clamped on both sides). fp32 inside; one
scale per row and 128 results, amax / 448.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.quant.norm_quant import empty_scales
from gptoss_kernels.quant.rounding import to_e4m3

ROWS = 16               # rows of a program; every expert's rows start at a multiple of it


@triton.jit
def _swiglu_quantise_kernel(y_ptr, bias_ptr, row_expert_ptr, q_ptr, scale_ptr, scale_row_stride, scale_group_stride,
                            INNER: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
                            PACKED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """ROWS rows of one expert and GROUPS scale groups: the bias is read once for all of the rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.load(row_expert_ptr + tl.program_id(0) * ROWS).to(tl.int64)
    if expert >= 0:                                                     # a group of rows begins with its real ones
        live = tl.load(row_expert_ptr + row) >= 0
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]      # [GROUPS, 128] results
        inside = live[:, None, None] & (column < INNER)[None, :, :]         # [ROWS, GROUPS, 128]
        at = row[:, None, None] * INNER + column[None, :, :]
        if PACKED:                                                      # a gate and its up are one 32-bit word
            pair = tl.load(y_ptr + at, mask=inside, other=0)
            gate = (pair << 16).to(tl.float32, bitcast=True)
            up = (pair & -65536).to(tl.float32, bitcast=True)
        else:
            gate = tl.load(y_ptr + 2 * at, mask=inside, other=0.0)
            up = tl.load(y_ptr + 2 * at + 1, mask=inside, other=0.0)
        if BIAS:
            bias = bias_ptr + expert * (2 * INNER) + 2 * column
            gate += tl.load(bias, mask=column < INNER, other=0.0)[None, :, :]
            up += tl.load(bias + 1, mask=column < INNER, other=0.0)[None, :, :]
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        h = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
        h = tl.where(inside, h, 0.0)
        amax = tl.max(tl.abs(h), axis=2)                                # [ROWS, GROUPS]
        scale = tl.where(amax > 0, amax / 448.0, 1.0)
        q = to_e4m3(tl.minimum(tl.maximum(h * (1.0 / scale)[:, :, None], -448.0), 448.0))
        tl.store(q_ptr + at, q, mask=inside)
        tl.store(scale_ptr + row[:, None] * scale_row_stride + group[None, :] * scale_group_stride, scale,
                 mask=live[:, None] & (group * 128 < INNER)[None, :])


def swiglu_quantise(
    y: torch.Tensor,
    row_expert: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = swiglu(y + bias[expert of the row]) as e4m3.

    y: [rows, 2 I] bf16 or fp32, contiguous. row_expert: [rows] int32, -1 for padding (left as it is);
    each 16 rows belong to one expert and begin with its real ones. bias: [E, 2 I]
    fp32. Returns q [rows, I] float8_e4m3fn and scale [rows, ceil(I / 128)] fp32, column-major.
    """
    rows, width = y.shape
    if width % 2 or row_expert.shape != (rows,) or not y.is_contiguous():
        raise ValueError(f"swiglu_quantise: y has shape {[rows, width]} and row_expert {list(row_expert.shape)}; "
                         "[rows, 2 I] contiguous and [rows] are needed")
    if y.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"swiglu_quantise: y is {y.dtype}; torch.bfloat16 or torch.float32")
    if bias is not None and (bias.dim() != 2 or bias.shape[1] != width or bias.dtype != torch.float32):
        raise ValueError(f"swiglu_quantise: bias is {bias.dtype} {list(bias.shape)}; fp32 [E, {width}] is needed")
    if rows % ROWS:
        raise ValueError(f"swiglu_quantise: {rows} rows; a multiple of {ROWS} is needed, each {ROWS} of one expert")
    inner = width // 2
    q = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=y.device)
    scale = empty_scales(rows, inner, y.device)
    packed = y.dtype == torch.bfloat16
    source = y.view(torch.int32) if packed else y
    groups = -(-inner // 128)
    _swiglu_quantise_kernel[(rows // ROWS, triton.cdiv(groups, 2))](
        source, scale if bias is None else bias, row_expert, q, scale, *scale.stride(), INNER=inner, ROWS=ROWS,
        GROUPS=2, BIAS=bias is not None, PACKED=packed, ALPHA=alpha, LIMIT=limit, num_warps=4)
    return q, scale
