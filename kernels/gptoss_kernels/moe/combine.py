"""Combine: a token's experts weighted and summed, with the residual added in the same pass.

    out[t] = residual[t] + sum_k weights[t, k] * (y[row_of[t, k]] + bias[ids[t, k]])

The down bias is inside the weighted sum, so it counts sum_k weight = 1 times, not k times. Where the GEMM's accumulator
started from the bias it is already in y and none is given here; a vendor GEMM without bias has it ride along in this
kernel, which reads y anyway. The sum is fp32, in the order of the slots (descending logit), rounded once.

A prompt's next product takes the RMSNorm of out in e4m3. Made here, while the rows are in registers, it costs one byte
written per number; made by a launch of its own, out is read again (`NormInto`).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gptoss_kernels.overlap import OVERLAPPING, after_previous
from gptoss_kernels.quant.norm_quant import columns_of, inverse_rms, normalised
from gptoss_kernels.quant.rounding import to_dtype, to_e4m3_groups
from gptoss_kernels.reference.quant import Quantised


@triton.jit
def _summed(y_ptr, row_of_ptr, weights_ptr, residual_ptr, ids_ptr, bias_ptr, token, h, first_local, H: tl.constexpr,
            TOP: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr):
    """Columns h (any shape) of one token (int64): the weighted sum in fp32."""
    inside = h < H
    total = tl.zeros(h.shape, dtype=tl.float32)
    if RESIDUAL:
        total = tl.load(residual_ptr + token * H + h, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP):
        row = tl.load(row_of_ptr + token * TOP + k).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP + k).to(tl.float32)
        live = inside & (row >= 0)
        part = tl.load(y_ptr + row * H + h, mask=live, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(ids_ptr + token * TOP + k).to(tl.int64) - first_local
            part += tl.load(bias_ptr + expert * H + h, mask=live, other=0.0).to(tl.float32)
        total += weight * part
    return total


@triton.jit
def _combine_kernel(y_ptr, row_of_ptr, weights_ptr, residual_ptr, ids_ptr, bias_ptr, out_ptr, first_local,
                    H: tl.constexpr, TOP: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
                    BLOCK_H: tl.constexpr):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = _summed(y_ptr, row_of_ptr, weights_ptr, residual_ptr, ids_ptr, bias_ptr, token, h, first_local, H, TOP,
                    RESIDUAL, BIAS)
    tl.store(out_ptr + token * H + h, to_dtype(total, out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def _combine_norm_kernel(y_ptr, row_of_ptr, weights_ptr, residual_ptr, ids_ptr, bias_ptr, out_ptr, gain_ptr, q_ptr,
                         scale_ptr, scale_row_stride, scale_group_stride, first_local, H: tl.constexpr,
                         TOP: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
                         EPS: tl.constexpr):
    """A whole token by one program, in chunks of GROUPS groups, which stay in registers until the norm is known."""
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    chunks = ()
    for i in tl.static_range((H + GROUPS * 128 - 1) // (GROUPS * 128)):
        total = _summed(y_ptr, row_of_ptr, weights_ptr, residual_ptr, ids_ptr, bias_ptr, token, columns_of(i, GROUPS),
                        first_local, H, TOP, RESIDUAL, BIAS)
        chunks = chunks + (to_dtype(total, out_ptr.dtype.element_ty),)
    inverse = inverse_rms(chunks, H, GROUPS, EPS)
    for i in tl.static_range(len(chunks)):
        h, group = columns_of(i, GROUPS), i * GROUPS + tl.arange(0, GROUPS)
        tl.store(out_ptr + token * H + h, chunks[i], mask=h < H)
        q, scale = to_e4m3_groups(normalised(chunks[i], inverse, gain_ptr, h, H).to(tl.float32))
        tl.store(q_ptr + token * H + h, q, mask=h < H)
        tl.store(scale_ptr + token * scale_row_stride + group * scale_group_stride, scale, mask=group * 128 < H)


def combine_config(t: int, h: int) -> dict[str, int]:
    """Columns of a program of `_combine_kernel` and its warps, for t tokens of h columns."""
    most = 4096 if t >= 1024 else 1024                                  # few tokens: more programs than rows
    return {"BLOCK_H": min(most, triton.next_power_of_2(h)), "num_warps": 4}


def combine_norm_config(h: int) -> dict[str, int]:
    """Groups of a chunk of `_combine_norm_kernel` and its launch options: 8 bytes of a row a lane, a warp a group."""
    groups = min(8, triton.next_power_of_2(-(-h // 128)))
    return {"GROUPS": groups, "num_warps": groups}


class NormInto(NamedTuple):
    """RMSNorm of the rows that a kernel writes, quantised as well: weight [H], epsilon, and room for the rows."""

    weight: torch.Tensor
    eps: float
    into: Quantised


def combine(
    y: torch.Tensor,
    row_of: torch.Tensor,
    weights: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    first_local: int = 0,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    norm: NormInto | None = None,
) -> torch.Tensor:
    """Weighted sum over each token's experts.

    y: [rows, H], one row per (token, expert). row_of: [T, k] int32, -1 where the expert is elsewhere (contributes
    nothing). weights: [T, k] fp32 or bf16. residual: [T, H], added. bias: [local experts, H] with ids [T, k] int32 and
    the first local expert's id: added to y inside the weighted sum. dtype: of the output, the residual's or y's by
    default. out: where the result goes, [T, H], contiguous, of that dtype (default: new memory). norm: also
    write the norm of the result in e4m3 there. Returns [T, H].
    """
    t, top = row_of.shape
    h = y.shape[1]
    if weights.shape != (t, top) or not (y.is_contiguous() and row_of.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"combine: weights {list(weights.shape)} for row_of {[t, top]}; equal shapes, contiguous")
    if residual is not None and (residual.shape != (t, h) or not residual.is_contiguous()):
        raise ValueError(f"combine: residual has shape {list(residual.shape)}; {[t, h]} contiguous is needed")
    if (bias is None) != (ids is None):
        raise ValueError("combine: bias and ids belong together; one of them is missing")
    if bias is not None and (bias.dim() != 2 or bias.shape[1] != h or ids.shape != (t, top)):
        raise ValueError(f"combine: bias {list(bias.shape)} and ids {list(ids.shape)}; "
                         f"[E, {h}] and {[t, top]} are needed")
    out_dtype = dtype or (y.dtype if residual is None else residual.dtype)
    if out is None:
        out = torch.empty(t, h, dtype=out_dtype, device=y.device)
    elif out.shape != (t, h) or out.dtype != out_dtype or not out.is_contiguous():
        raise ValueError(f"combine: out is {out.dtype} {list(out.shape)}; contiguous {out_dtype} {[t, h]} is needed")
    given = (y, row_of, weights, out if residual is None else residual, row_of if ids is None else ids,
             y if bias is None else bias, out)
    shape = {"H": h, "TOP": top, "RESIDUAL": residual is not None, "BIAS": bias is not None, **OVERLAPPING}
    if norm is None:
        config = combine_config(t, h)
        _combine_kernel[(t, triton.cdiv(h, config["BLOCK_H"]))](*given, first_local, **shape, **config)
        return out
    if norm.weight.shape != (h,) or norm.into.values.shape[0] < t or norm.into.values.shape[1] != h:
        raise ValueError(f"combine: norm of {list(norm.weight.shape)} into {list(norm.into.values.shape)}; {[h]} into "
                         f"at least {t} rows of {h} is needed")
    _combine_norm_kernel[(t,)](*given, norm.weight, *norm.into, *norm.into.scale.stride(), first_local, EPS=norm.eps,
                               **shape, **combine_norm_config(h))
    return out
