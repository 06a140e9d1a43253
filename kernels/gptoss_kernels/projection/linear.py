"""A dense FP8 product with its bias: the grouped GEMM of the experts with a single group.

    y = bias + norm(x) . W^T        activations e4m3 in 1x128 groups, W e4m3 in 128x128 blocks, fp32 accumulators

QKV and output projection in FP8 read half the bytes in decode and take half the time in prefill. The kernels exist for
the experts; one group is all that a dense product is, so the bias starts the accumulator here as well. Up to 16 tokens
the decode form runs, which is bound by the weights it reads; above, the tensor-core form.

The rows of the product are padded to whole tiles; what a `RowPlan` holds of that is made once per step and shared by
all layers. What is lost: weights rounded to e4m3 (their error is measured at load), activations rounded to 3 bits.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gptoss_kernels.moe import decode_cuda, gemm_cuda, gemm_triton
from gptoss_kernels.projection.backends import sizes_obstacle, triton_obstacle
from gptoss_kernels.quant import Quantised, norm_quantise
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.reference.fused import fp8_linear
from gptoss_kernels.reference.quant import dequantise_groups
from gptoss_kernels.registry import register
from gptoss_kernels.upload import upload

FEW_ROWS = 16


@dataclass(frozen=True)
class RowPlan:
    """How T rows lie in tiles: all of them in one group.

    tokens: T. rows: T rounded up to whole tiles of `align` rows. counts: [1] int32, T. tile_expert: [tiles] int32,
    zeros. tile_rows: [tiles] int32, real rows of each tile. token_of: None, rows are not gathered.
    """

    tokens: int
    rows: int
    align: int
    counts: torch.Tensor
    tile_expert: torch.Tensor
    tile_rows: torch.Tensor
    token_of: None = None


def row_plan(tokens: int, align: int, device: torch.device | str) -> RowPlan:
    """The plan of `tokens` rows in tiles of `align`."""
    if tokens < 1 or align < 1:
        raise ValueError(f"row_plan: {tokens} tokens in tiles of {align}; at least 1 of both is needed")
    real = [min(align, tokens - first) for first in range(0, tokens, align)]
    packed = upload(torch.tensor([tokens, *real, *[0] * len(real)], dtype=torch.int32), device)
    return RowPlan(tokens, len(real) * align, align, packed[:1], packed[1 + len(real) :], packed[1 : 1 + len(real)])


def fp8_linear_align(backend: str, tokens: int) -> int:
    """Rows of a tile for a backend of "fp8_linear" and this many tokens."""
    if backend == "cuda":
        return decode_cuda.TILE if tokens <= FEW_ROWS else gemm_cuda.TILE_M
    return 16 if tokens <= 128 else 64


def _cuda_obstacle(**needs: object) -> str | None:
    return sizes_obstacle(needs, 4096) or gemm_cuda.obstacle(needs.get("device"),
                                                             dtype=needs.get("dtype", torch.bfloat16))


def _make(gemm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(
        x: torch.Tensor | Quantised, weight: torch.Tensor, scale_inv: torch.Tensor, bias: torch.Tensor, plan: RowPlan,
        norm_weight: torch.Tensor | None = None, eps: float = 1e-5, *, out: torch.Tensor | None = None,
        add: bool = False, dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """As `reference.fused.fp8_linear`; plan: of x's rows. x: [T, K], or quantised already: at least plan.rows rows,
        no norm. bias: fp32. out: [T, N], where the result goes; add: to what is there, the product rounded first.
        Returns [T, N] in x's dtype, of quantised rows in `dtype`."""
        if isinstance(x, Quantised):
            check_quantised("fp8_linear", x, plan.rows, weight.shape[1], norm_weight)
        elif plan.tokens != x.shape[0]:
            raise ValueError(f"fp8_linear: x has {x.shape[0]} rows and its plan {plan.tokens}; one number is needed")
        else:
            dtype, x = x.dtype, norm_quantise(x, norm_weight, rows=plan.rows, norm_eps=eps)
        matrix = ExpertMatrices("fp8", weight[None], scale_inv[None])
        return gemm(*x, matrix, bias[None], plan, dtype, out, add)

    return run


def check_quantised(what: str, x: Quantised, rows: int, columns: int, norm_weight: torch.Tensor | None) -> None:
    """ValueError unless x has at least so many rows of so many columns, and no norm is asked of it any more."""
    if x.values.shape[0] < rows or x.values.shape[1] != columns:
        raise ValueError(f"{what}: quantised x is {list(x.values.shape)}; at least {rows} rows of {columns} are needed")
    if norm_weight is not None:
        raise ValueError(f"{what}: x is quantised already and a norm weight is given; the norm comes before")


def _cuda_gemm(q, scale, m: ExpertMatrices, bias, plan: RowPlan, dtype: torch.dtype, out, add: bool) -> torch.Tensor:
    if plan.align == decode_cuda.TILE:
        return _into(decode_cuda.decode_gemm(q, scale, m, bias, plan)[: plan.tokens], out, add)
    return gemm_cuda.grouped_gemm(q, scale, m.values, m.scales, bias, plan.counts, out=out, add=add)[: plan.tokens]


def _triton_gemm(q, scale, m: ExpertMatrices, bias, plan: RowPlan, dtype: torch.dtype, out, add: bool) -> torch.Tensor:
    y = gemm_triton.grouped_gemm(q, scale, m.values, m.scales, bias, plan.tile_expert, plan.tile_rows, dtype=dtype)
    return _into(y[: plan.tokens], out, add)


def _into(y: torch.Tensor, out: torch.Tensor | None, add: bool) -> torch.Tensor:
    """y, where it was wanted: for kernels that write to memory of their own."""
    if out is None:
        return y
    return out.add_(y) if add else out.copy_(y)


fp8_linear_cuda = register("fp8_linear", "cuda", rank=10, obstacle=_cuda_obstacle)(_make(_cuda_gemm))
fp8_linear_triton = register("fp8_linear", "triton", rank=500, obstacle=triton_obstacle)(_make(_triton_gemm))


@register("fp8_linear", "reference", rank=1000)
def fp8_linear_reference(
    x: torch.Tensor | Quantised, weight: torch.Tensor, scale_inv: torch.Tensor, bias: torch.Tensor, plan: RowPlan,
    norm_weight: torch.Tensor | None = None, eps: float = 1e-5, *, out: torch.Tensor | None = None, add: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Plain torch; of the plan only the number of rows is needed."""
    if isinstance(x, Quantised):
        check_quantised("fp8_linear", x, plan.tokens, weight.shape[1], norm_weight)
        x = dequantise_groups(x.values[: plan.tokens], x.scale[: plan.tokens]).to(dtype)
    return _into(fp8_linear(x, weight, scale_inv, bias, norm_weight, eps), out, add)
