"""The MoE layer in bf16 throughout, as a peer: our routing and combine around torch's grouped product of bf16 rows.

Nothing is quantised, so its weights are twice as many bytes and its products run at half the rate. Bias and SwiGLU take
a kernel of their own, since torch's product has neither; the down bias rides in the combine. The library needs no such
backend; what is here is as fast as two short kernels make it, so that a comparison with it is fair.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gptoss_kernels.moe import LayerWeights, combine, route
from gptoss_kernels.quant.norm_quant import columns_of, inverse_rms, load_row, normalised, places
from gptoss_kernels.quant.rounding import to_dtype
from gptoss_kernels.quant.swiglu_quant import ROWS, gate_and_up, swiglu

ALIGN = 128             # rows of an expert start at a multiple of it, as in the e4m3 layers


class Dense(NamedTuple):
    """gate_up [E, 2 I, H] and down [E, H, I], bf16; gate and up rows in turn."""

    gate_up: torch.Tensor
    down: torch.Tensor


@triton.jit
def _norm_place_kernel(x_ptr, gain_ptr, out_ptr, row_of_ptr, H: tl.constexpr, COPIES: tl.constexpr,
                       GROUPS: tl.constexpr, EPS: tl.constexpr):
    """One token by one program: normalised, written to its places."""
    token = tl.program_id(0).to(tl.int64)
    rows = places(token, row_of_ptr, COPIES, True)
    chunks = load_row(x_ptr + token * H, H, GROUPS)
    inverse = inverse_rms(chunks, H, GROUPS, EPS)
    for i in tl.static_range(len(chunks)):
        h = columns_of(i, GROUPS)
        x = normalised(chunks[i], inverse, gain_ptr, h, H)
        for c in tl.static_range(COPIES):
            tl.store(out_ptr + rows[c].to(tl.int64) * H + h, x, mask=(h < H) & (rows[c] >= 0))


@triton.jit
def _bias_swiglu_kernel(y_ptr, bias_ptr, row_expert_ptr, out_ptr, INNER: tl.constexpr, ROWS: tl.constexpr,
                        BLOCK: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """ROWS rows of one expert and BLOCK results of each. y_ptr, bias_ptr: to words that hold a gate and its up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(row_expert_ptr + tl.program_id(0) * ROWS).to(tl.int64)
    if expert >= 0:
        inside = (tl.load(row_expert_ptr + row) >= 0)[:, None] & (column < INNER)[None, :]
        at = row[:, None] * INNER + column[None, :]
        gate, up = gate_and_up(tl.load(y_ptr + at, mask=inside, other=0))
        bias_gate, bias_up = gate_and_up(tl.load(bias_ptr + expert * INNER + column, mask=column < INNER, other=0))
        h = swiglu(gate + bias_gate[None, :], up + bias_up[None, :], ALPHA, LIMIT)
        tl.store(out_ptr + at, to_dtype(h, out_ptr.dtype.element_ty), mask=inside)


def norm_place(x: torch.Tensor, gain: torch.Tensor, row_of: torch.Tensor, rows: int, eps: float) -> torch.Tensor:
    """RMSNorm of x [T, H] bf16, each row written to the places row_of [T, k] int32 gives it. Returns [rows, H]."""
    t, h = x.shape
    out = torch.empty(rows, h, dtype=x.dtype, device=x.device)
    _norm_place_kernel[(t,)](x, gain, out, row_of, H=h, COPIES=row_of.shape[1],
                             GROUPS=min(8, triton.next_power_of_2(-(-h // 128))), EPS=eps, num_warps=4)
    return out


def bias_swiglu(y: torch.Tensor, row_expert: torch.Tensor, bias: torch.Tensor, alpha: float, limit: float
                ) -> torch.Tensor:
    """swiglu(y + bias of the row's expert). y: [rows, 2 I] bf16. bias: [E, 2 I] fp32. Returns [rows, I] bf16."""
    rows, inner = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, inner, dtype=y.dtype, device=y.device)
    block = min(256, triton.next_power_of_2(inner))
    _bias_swiglu_kernel[(rows // ROWS, triton.cdiv(inner, block))](
        y.view(torch.int32), bias.view(torch.int64), row_expert, out, INNER=inner, ROWS=ROWS, BLOCK=block, ALPHA=alpha,
        LIMIT=limit, num_warps=8)
    return out


def moe_layer_bf16(x: torch.Tensor, layer: LayerWeights, dense: Dense, live: int | None = None) -> torch.Tensor:
    """x + experts. x: [T, H] bf16. layer: its norm, router and biases. dense: the experts' matrices.

    live: rows that this routing needs, padding included, if the caller knows; else products have room for any routing.
    Returns [T, H] bf16. Padding rows hold whatever memory held, and nobody reads them.
    """
    r = route(x, layer.router, layer.router_bias, experts_per_token=layer.experts_per_token, norm_weight=layer.norm,
              norm_eps=layer.norm_eps, align=ALIGN)
    rows = r.rows if live is None else live
    ends = (r.starts + (r.counts + (ALIGN - 1)) // ALIGN * ALIGN).to(torch.int32)
    a = norm_place(x, layer.norm, r.row_of, rows, layer.norm_eps)
    u = torch._grouped_mm(a, dense.gate_up.transpose(1, 2), offs=ends)
    h = bias_swiglu(u, r.row_expert, layer.gate_up_bias, layer.alpha, layer.limit)
    y = torch._grouped_mm(h, dense.down.transpose(1, 2), offs=ends)
    return combine(y, r.row_of, r.weights, residual=x, ids=r.ids, bias=layer.down_bias)
