"""Bias, clamped SwiGLU and e4m3 quantisation of a finished GEMM output: the separate kernel of a GEMM that fuses nothing.

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


@triton.jit
def _swiglu_quantise_kernel(y_ptr, bias_ptr, row_expert_ptr, q_ptr, scale_ptr, scale_row_stride, scale_group_stride,
                            I: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
                            LIMIT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(row_expert_ptr + row).to(tl.int64)
    if expert >= 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        both = group[:, None] * 256 + tl.arange(0, 256)[None, :]        # [GROUPS, 256] gate and up in turn
        y = tl.load(y_ptr + row * (2 * I) + both, mask=both < 2 * I, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + expert * (2 * I) + both, mask=both < 2 * I, other=0.0)
        gate, up = tl.split(tl.reshape(y, [GROUPS, 128, 2]))
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        h = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        h = tl.where(column < I, h, 0.0)
        amax = tl.max(tl.abs(h), axis=1)
        scale = tl.where(amax > 0, amax / 448.0, 1.0)
        q = to_e4m3(tl.minimum(tl.maximum(h * (1.0 / scale)[:, None], -448.0), 448.0))
        tl.store(q_ptr + row * I + column, q, mask=column < I)
        tl.store(scale_ptr + row * scale_row_stride + group * scale_group_stride, scale, mask=group * 128 < I)


def swiglu_quantise(
    y: torch.Tensor,
    row_expert: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = swiglu(y + bias[expert of the row]) as e4m3.

    y: [rows, 2 I] bf16 or fp32, contiguous. row_expert: [rows] int32, -1 for padding (left as it is). bias: [E, 2 I]
    fp32. Returns q [rows, I] float8_e4m3fn and scale [rows, ceil(I / 128)] fp32, column-major.
    """
    rows, width = y.shape
    if width % 2 or row_expert.shape != (rows,) or not y.is_contiguous():
        raise ValueError(f"swiglu_quantise: y has shape {[rows, width]} and row_expert {list(row_expert.shape)}; "
                         "[rows, 2 I] contiguous and [rows] are needed")
    if bias is not None and (bias.dim() != 2 or bias.shape[1] != width or bias.dtype != torch.float32):
        raise ValueError(f"swiglu_quantise: bias is {bias.dtype} {list(bias.shape)}; fp32 [E, {width}] is needed")
    inner = width // 2
    q = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=y.device)
    scale = empty_scales(rows, inner, y.device)
    groups = min(8, triton.next_power_of_2(-(-inner // 128)))
    _swiglu_quantise_kernel[(rows, triton.cdiv(inner, 128 * groups))](
        y, y if bias is None else bias, row_expert, q, scale, *scale.stride(), I=inner, GROUPS=groups,
        BIAS=bias is not None, ALPHA=alpha, LIMIT=limit, num_warps=4)
    return q, scale
