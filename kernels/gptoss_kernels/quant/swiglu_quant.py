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
from gptoss_kernels.quant.rounding import INTERPRETED, to_e4m3_groups

ROWS = 16               # rows that belong to one expert; every expert's rows start at a multiple of it


@triton.jit
def reciprocal(x):
    """1 / x of x from 1 to infinity in one instruction; a division takes five, to be right for denormal x too."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gate_and_up(word):
    """Both in fp32, of the one word in which they lie side by side: 32 bits of bf16 or 64 bits of fp32."""
    if word.dtype.primitive_bitwidth == 64:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    else:                                                               # a bf16 is the upper half of an fp32
        low, high = word << 16, word & -65536
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gate sigmoid(ALPHA gate) (up + 1) of the clamped two, fp32."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * reciprocal(1.0 + tl.exp2(gate * (-1.4426950408889634 * ALPHA))) * (up + 1.0)


@triton.jit
def _swiglu_quantise_kernel(y_ptr, bias_ptr, row_expert_ptr, q_ptr, scale_ptr, scale_row_stride, scale_group_stride,
                            INNER: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
                            ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """ROWS rows of one expert and GROUPS scale groups, one after the other. The bias is read once for all of the rows.

    Neighbouring programs take neighbouring groups of the same rows, so reads and writes follow memory.
    """
    chunks: tl.constexpr = (INNER + GROUPS * 128 - 1) // (GROUPS * 128)
    first, chunk = tl.program_id(0) // chunks * ROWS, tl.program_id(0) % chunks
    expert = tl.load(row_expert_ptr + first).to(tl.int64)
    if expert >= 0:                                                     # a group of rows begins with its real ones
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        live = tl.load(row_expert_ptr + row) >= 0
        for i in tl.range(GROUPS, num_stages=1):
            group = chunk * GROUPS + i
            column = group * 128 + tl.arange(0, 128)
            inside = live[:, None] & (column < INNER)[None, :]          # [ROWS, 128] results
            at = row[:, None] * INNER + column[None, :]
            gate, up = gate_and_up(tl.load(y_ptr + at, mask=inside, other=0))
            if BIAS:
                bias = tl.load(bias_ptr + expert * INNER + column, mask=column < INNER, other=0)
                gate_bias, up_bias = gate_and_up(bias)
                gate += gate_bias[None, :]
                up += up_bias[None, :]
            q, scale = to_e4m3_groups(swiglu(gate, up, ALPHA, LIMIT))   # 0 where y is beyond INNER
            tl.store(q_ptr + at, q, mask=inside)
            tl.store(scale_ptr + row * scale_row_stride + group * scale_group_stride, scale,
                     mask=live & (group * 128 < INNER))


def swiglu_quantise_config() -> dict[str, int]:
    """Rows and scale groups of a program of `_swiglu_quantise_kernel`, and its warps."""
    return {"ROWS": 8, "GROUPS": 4, "num_warps": 2, "maxnreg": 64}


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
    word = torch.int32 if y.dtype == torch.bfloat16 else torch.int64
    config = swiglu_quantise_config()
    _swiglu_quantise_kernel[(rows // config["ROWS"] * triton.cdiv(scale.shape[1], config["GROUPS"]),)](
        y.view(word), scale if bias is None else bias.view(torch.int64), row_expert, q, scale, *scale.stride(),
        INNER=inner, BIAS=bias is not None, ALPHA=alpha, LIMIT=limit, **config)
    return q, scale
