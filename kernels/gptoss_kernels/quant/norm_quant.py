"""RMSNorm fused with e4m3 quantisation in 1x128 groups.

Rows keep their order, or go to places: a grouped GEMM that cannot gather (TMA on Hopper does not) wants its rows sorted
by expert, so each token's quantised row is written to all its places while it is still in registers: one read of the
row, k writes of one byte per element. The normalised row is rounded to the activations' dtype before it is
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
from gptoss_kernels.quant.rounding import to_dtype, to_e4m3_groups
from gptoss_kernels.reference.quant import Quantised


def empty_quantised(rows: int, columns: int, device: torch.device | str, *, by_row: bool = False) -> Quantised:
    """Room for rows in e4m3, with scales as the grouped GEMMs read them (`empty_scales`); by_row: the scales of a row
    side by side, as `place_scales` reads them fastest."""
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    if not by_row:
        return Quantised(values, empty_scales(rows, columns, device))
    groups = -(-columns // 128)
    return Quantised(values, torch.empty(rows, -(-groups // 8) * 8, dtype=torch.float32, device=device)[:, :groups])


@triton.jit
def places(token, row_of_ptr, COPIES: tl.constexpr, PLACED: tl.constexpr):
    """Rows of the output for a token, a tuple; asked for early, so that no store waits for them."""
    rows = ()
    for c in tl.static_range(COPIES):
        rows = rows + ((tl.load(row_of_ptr + token * COPIES + c) if PLACED else token),)
    return rows


@triton.jit
def columns_of(chunk: tl.constexpr, GROUPS: tl.constexpr):
    """[GROUPS, 128]: the columns of one chunk of a row."""
    return (chunk * GROUPS + tl.arange(0, GROUPS))[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit
def load_row(row_ptr, H: tl.constexpr, GROUPS: tl.constexpr):
    """A row as a tuple of chunks [GROUPS, 128], zeros behind its end. Triton has only powers of two: 2880 columns as
    one chunk of 32 groups leave 30 % of the lanes and registers to nothing, as three of 8 groups 6 %."""
    chunks = ()
    for i in tl.static_range((H + GROUPS * 128 - 1) // (GROUPS * 128)):
        h = columns_of(i, GROUPS)
        chunks = chunks + (tl.load(row_ptr + h, mask=h < H, other=0.0),)
    return chunks


@triton.jit
def inverse_rms(chunks, H: tl.constexpr, GROUPS: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean square + EPS) of a row, fp32."""
    squares = tl.zeros((GROUPS, 128), dtype=tl.float32)
    for i in tl.static_range(len(chunks)):
        squares += chunks[i].to(tl.float32) * chunks[i].to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, axis=1), axis=0) / H + EPS)


@triton.jit
def normalised(chunk, inverse, gain_ptr, h, H: tl.constexpr):
    """A chunk of a row times inverse and gain, rounded once, to the row's dtype."""
    gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    return to_dtype(chunk.to(tl.float32) * inverse * gain, chunk.dtype)


@triton.jit
def quantise_row(token, x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride, scale_group_stride,
                 H: tl.constexpr, COPIES: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
                 PLACED: tl.constexpr, EPS: tl.constexpr):
    """One token (int64) by one program, in chunks of GROUPS groups: normalised, quantised, written to its places.

    The stores are masked where a place is -1: inside a branch, their operands would be laid out anew for each place.
    """
    rows = places(token, row_of_ptr, COPIES, PLACED)
    chunks = load_row(x_ptr + token * H, H, GROUPS)
    inverse = 1.0
    if NORM:
        inverse = inverse_rms(chunks, H, GROUPS, EPS)
    for i in tl.static_range(len(chunks)):
        h, group = columns_of(i, GROUPS), i * GROUPS + tl.arange(0, GROUPS)
        x = normalised(chunks[i], inverse, gain_ptr, h, H) if NORM else chunks[i]
        q, scale = to_e4m3_groups(x.to(tl.float32))                     # [GROUPS, 128], [GROUPS]
        for c in tl.static_range(COPIES):
            row = rows[c].to(tl.int64)
            tl.store(q_ptr + row * H + h, q, mask=(h < H) & (row >= 0))
            tl.store(scale_ptr + row * scale_row_stride + group * scale_group_stride, scale,
                     mask=(group * 128 < H) & (row >= 0))


@triton.jit
def _norm_quantise_kernel(x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride, scale_group_stride,
                          H: tl.constexpr, COPIES: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
                          PLACED: tl.constexpr, EPS: tl.constexpr):
    after_previous()
    quantise_row(tl.program_id(0).to(tl.int64), x_ptr, gain_ptr, q_ptr, scale_ptr, row_of_ptr, scale_row_stride,
                 scale_group_stride, H, COPIES, GROUPS, NORM, PLACED, EPS)


def norm_quantise_config(t: int, h: int, placed: bool) -> dict[str, int]:
    """Groups of a chunk of `_norm_quantise_kernel` and its launch options, for t rows of h columns. Many rows that keep
    their order are read in chunks, so that more programs share a multiprocessor; written to four places each, they wait
    for the stores either way."""
    if t >= 1024 and h > 1024 and not placed:
        return ({"GROUPS": 8, "num_warps": 2, "maxnreg": 64} if h <= 3072 else
                {"GROUPS": 8, "num_warps": 4, "maxnreg": max(40, 16 + 8 * -(-h // 1024))})
    return dict(GROUPS=triton.next_power_of_2(-(-h // 128)), num_warps=4)


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
    out: Quantised | None = None,
) -> Quantised:
    """Quantise (after RMSNorm, if a weight is given) every row of x, and put it where `row_of` says.

    x: [T, H] bf16 or fp32, contiguous. norm_weight: [H]. row_of: [T, k] int32, rows of the output that receive this
    token (-1: nowhere). rows: how many rows the output has; without row_of the first T of them are x's (default: T).
    out: room for at least so many rows, contiguous values; made if None.
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
    made = empty_quantised(t if rows is None else rows, h, x.device) if out is None else out
    _norm_quantise_kernel[(t,)](
        x, x if norm_weight is None else norm_weight, *made, x if row_of is None else row_of, *made.scale.stride(),
        H=h, COPIES=1 if row_of is None else row_of.shape[1], NORM=norm_weight is not None, PLACED=row_of is not None,
        EPS=norm_eps, **norm_quantise_config(t, h, row_of is not None), **OVERLAPPING)
    return made
