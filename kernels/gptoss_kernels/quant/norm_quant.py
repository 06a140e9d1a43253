"""RMSNorm fused with e4m3 quantisation in 1x128 groups, written once per expert a token goes to.

The MoE's first GEMM wants its rows sorted by expert; TMA on Hopper cannot gather rows, so each token's quantised row is
written to all its places here, while it is still in registers: one read of the row, k writes of one byte per element.
With no places given the rows keep their order. The normalised row is rounded to the activations' dtype before it is
quantised, so the experts see what the router saw. 2880 columns are 22 groups of 128 and one of 64: the last group's
scale is its own amax over 64 columns.

scale = amax / 448, and 1 for a group of zeros. The division is a multiplication by 1/scale, correctly rounded once more
than in the reference: a value on the edge of two codes may land on the other one.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.overlap import OVERLAPPING, after_previous
from gptoss_kernels.quant.rounding import to_dtype, to_e4m3


@triton.jit
def quantise_row(token, x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride, scale_group_stride,
                 H: tl.constexpr, COPIES: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
                 PLACED: tl.constexpr, EPS: tl.constexpr):
    """One token (int64) by one program: normalised, quantised, written to its places."""
    group = tl.arange(0, GROUPS)
    h = group[:, None] * 128 + tl.arange(0, 128)[None, :]               # [GROUPS, 128]
    x = tl.load(x_ptr + token * H + h, mask=h < H, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / H + EPS)
        gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        x = to_dtype(wide * inverse * gain, x_ptr.dtype.element_ty)
    wide = x.to(tl.float32)
    amax = tl.max(tl.abs(wide), axis=1)                                 # [GROUPS]
    scale = tl.where(amax > 0, amax / 448.0, 1.0)
    q = wide * (1.0 / scale)[:, None]
    q = to_e4m3(tl.minimum(tl.maximum(q, -448.0), 448.0))
    for c in tl.static_range(COPIES):
        row = token
        if PLACED:
            row = tl.load(row_of_ptr + token * COPIES + c).to(tl.int64)
        if row >= 0:
            tl.store(q_ptr + row * H + h, q, mask=h < H)
            tl.store(scale_ptr + row * scale_row_stride + group * scale_group_stride, scale, mask=group * 128 < H)


@triton.jit
def _norm_quantise_kernel(x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride, scale_group_stride,
                          H: tl.constexpr, COPIES: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
                          PLACED: tl.constexpr, EPS: tl.constexpr):
    after_previous()
    quantise_row(tl.program_id(0).to(tl.int64), x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride,
                 scale_group_stride, H, COPIES, GROUPS, NORM, PLACED, EPS)


def empty_scales(rows: int, columns: int, device: torch.device | str) -> torch.Tensor:
    """[rows, ceil(columns / 128)] fp32 whose rows are neighbours in memory: what the grouped GEMMs read fastest."""
    padded = -(-rows // 4) * 4
    whole = torch.empty_strided((padded, -(-columns // 128)), (1, padded), dtype=torch.float32, device=device)
    return whole if padded == rows else whole[:rows]


def norm_quantise(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    row_of: torch.Tensor | None = None,
    rows: int | None = None,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (after RMSNorm, if a weight is given) every row of x, and put it where `row_of` says.

    x: [T, H] bf16 or fp32, contiguous. norm_weight: [H]. row_of: [T, k] int32, rows of the output that receive this
    token (-1: nowhere). rows: how many rows the output has; without row_of the first T of them are x's (default: T).
    Returns q [rows, H] float8_e4m3fn and scale [rows, ceil(H / 128)] fp32 (column-major). Rows that nobody was sent to
    keep whatever the memory held, NaN included.
    """
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"norm_quantise: x has shape {list(x.shape)}, contiguous {x.is_contiguous()}; "
                         "[T, H] contiguous is needed")
    t, h = x.shape
    if norm_weight is not None and norm_weight.shape != (h,):
        raise ValueError(f"norm_quantise: norm weight has shape {list(norm_weight.shape)}; [{h}] is needed")
    if row_of is not None and rows is None:
        raise ValueError("norm_quantise: row_of is given and rows missing; rows is how many rows the output has")
    if row_of is None and rows is not None and rows < t:
        raise ValueError(f"norm_quantise: {t} rows do not fit an output of {rows}; at least {t} are needed")
    if row_of is not None and (row_of.dim() != 2 or row_of.shape[0] != t or not row_of.is_contiguous()):
        raise ValueError(f"norm_quantise: row_of has shape {list(row_of.shape)}; [{t}, k] contiguous is needed")
    q = torch.empty(t if rows is None else rows, h, dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_scales(q.shape[0], h, x.device)
    _norm_quantise_kernel[(t,)](
        x, x if norm_weight is None else norm_weight, q, scale, x if row_of is None else row_of, *scale.stride(),
        H=h, COPIES=1 if row_of is None else row_of.shape[1], GROUPS=triton.next_power_of_2(-(-h // 128)),
        NORM=norm_weight is not None, PLACED=row_of is not None, EPS=norm_eps, num_warps=4,
        **OVERLAPPING)
    return q, scale
