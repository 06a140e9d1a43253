"""The expert layer over weights in whatever form they are stored: dense, MXFP4 codes, or e4m3 in 128x128 blocks.

A stack of E weight matrices is three things: the name of its form, its values and its scales. Only the experts that
were chosen are touched, one at a time: its matrix is turned dense, used for all of its rows, and forgotten. So a model
whose experts would fill 38 GiB in bf16 needs room for its codes and for one dense matrix. What is lost is speed: a
matrix is decoded again at every step, which a fused kernel does on the way to the multiplier.
"""
from __future__ import annotations

from typing import NamedTuple

import torch

from gptoss_kernels.reference.moe import combine_experts, expert_mlp
from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups, mxfp4_decode


class ExpertMatrices(NamedTuple):
    """One projection of all experts of a layer, [E, out, in], in one of three forms.

    form "dense": values [E, out, in] float, scales None.
    form "mxfp4": values [E, out, in / 32, 16] uint8 (low nibble first), scales [E, out, in / 32] uint8.
    form "fp8":   values [E, out, in] float8_e4m3fn, scales [E, ceil(out / 128), ceil(in / 128)] fp32.
    """

    form: str
    values: torch.Tensor
    scales: torch.Tensor | None = None


def dense_matrix(matrices: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix of one expert, [out, in] in `dtype`; decoded exactly, then rounded once to `dtype`."""
    values = matrices.values[expert]
    if matrices.form == "dense":
        return values.to(dtype)
    if matrices.form == "mxfp4":
        return mxfp4_decode(values, matrices.scales[expert], dtype)
    if matrices.form == "fp8":
        return dequantise_blocks(values, matrices.scales[expert], dtype=dtype)
    raise ValueError(f"expert matrices have form {matrices.form!r}; 'dense', 'mxfp4' or 'fp8' are known")


def moe(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices,
    gate_up_bias: torch.Tensor,
    down: ExpertMatrices,
    down_bias: torch.Tensor,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    first_expert: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token through its chosen experts: sum of weight * (down(swiglu(gate_up(x) + bias)) + bias).

    x: [T, H], or values and scales of rows in e4m3 (`dequantise_groups`), T of them or more, which are then taken in
    `dtype`. ids: [T, k] int64, global expert ids. weights: [T, k]. gate_up: E matrices [2 I, H], rows alternating
    gate and up. gate_up_bias: [E, 2 I]. down: E matrices [H, I]. down_bias: [E, H]. first_expert: the global id of
    matrix 0; ids outside [first_expert, first_expert + E) belong to other ranks and contribute exactly nothing here.
    out: where the result goes, [T, H] (default: new memory). Returns [T, H] in x's dtype. Both products leave their
    multiplier rounded to x's dtype; SwiGLU and the weighted sum are fp32 at least.
    """
    if isinstance(x, tuple):
        x = dequantise_groups(*(part[: ids.shape[0]] for part in x)).to(dtype)

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        e -= first_expert
        up_matrix, down_matrix = dense_matrix(gate_up, e, x.dtype), dense_matrix(down, e, x.dtype)
        return expert_mlp(rows, up_matrix, gate_up_bias[e], down_matrix, down_bias[e], alpha, limit)

    here = range(first_expert, first_expert + gate_up.values.shape[0])
    total = combine_experts(x, ids, weights, expert, here)
    return total if out is None else out.copy_(total)


def empty_matrices(form: str, experts: int, out: int, into: int, dtype: torch.dtype) -> ExpertMatrices:
    """Uninitialised `ExpertMatrices` of `experts` matrices [out, into]; dtype is that of the dense form."""
    if form == "dense":
        return ExpertMatrices(form, torch.empty(experts, out, into, dtype=dtype))
    if form == "mxfp4":
        groups = into // 32
        codes = torch.empty(experts, out, groups, 16, dtype=torch.uint8)
        return ExpertMatrices(form, codes, torch.empty(experts, out, groups, dtype=torch.uint8))
    if form == "fp8":
        values = torch.empty(experts, out, into, dtype=torch.float8_e4m3fn)
        return ExpertMatrices(form, values, torch.empty(experts, -(-out // 128), -(-into // 128)))
    raise ValueError(f"expert matrices have form {form!r}; 'dense', 'mxfp4' or 'fp8' are known")
