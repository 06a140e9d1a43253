"""The whole MoE layer: hidden states in, hidden states out, one function per backend.

    out = x + sum_k weight_k * (down_k(swiglu(gate_up_k(RMSNorm(x)) + bias)) + bias)

Nothing synchronises with the host: buffers are sized for any routing, and every launch reads its sizes on the device,
so a layer can be captured in a CUDA graph. Launches of the `cuda` backend: routing 2 or 3, quantise 2 (up to 128 tokens
a part of the routing), GEMM 2, combine 1. Up to 128 tokens, or with MXFP4 weights, its GEMMs take the decode form;
above, the tensor-core form with SwiGLU fused. One token, or two with FP8 experts: three launches in all (`few_cuda`).
`choose("moe_layer", backend, device=..., expert_form=..., dtype=..., hidden_size=...)` decides once and says why.
The same backends serve the two halves: "choose_experts", and "moe", the experts alone after a choice made elsewhere,
whose rows may be quantised already.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from gptoss_kernels.moe import decode_cuda, deepgemm, few_cuda, gemm_cuda, gemm_triton
from gptoss_kernels.moe.combine import NormInto, combine
from gptoss_kernels.moe.routing import FEW_TOKENS, Routing, choose, place, route, router_logits
from gptoss_kernels.quant import (
    Quantised,
    empty_quantised,
    norm_quantise,
    place_rows,
    place_scales,
    swiglu_quantise,
)
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.reference.experts import moe as reference_moe
from gptoss_kernels.reference.moe import route as reference_route
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import quantise_into
from gptoss_kernels.registry import register


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one MoE layer as the kernels take them.

    norm: [H]. router: [E, H], router_bias: [E], both in the hidden states' dtype. gate_up: matrices [2 I, H] of the
    experts held here, gate and up rows in turn; down: of [H, I]. gate_up_bias: [experts, 2 I] fp32, down_bias:
    [experts, H] fp32. first_expert: global id of the first of them.
    """

    norm: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: ExpertMatrices
    gate_up_bias: torch.Tensor
    down: ExpertMatrices
    down_bias: torch.Tensor
    first_expert: int = 0
    experts_per_token: int = 4
    norm_eps: float = 1e-5
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        experts, two_i = self.gate_up_bias.shape
        hidden = self.norm.shape[0]
        for name, matrices in (("gate_up", self.gate_up), ("down", self.down)):
            if matrices.values.shape[0] != experts:
                raise ValueError(f"LayerWeights: {name} has {matrices.values.shape[0]} experts; its biases {experts}")
        if self.down_bias.shape != (experts, hidden) or two_i % 2:
            raise ValueError(f"LayerWeights: biases {[experts, two_i]} and {list(self.down_bias.shape)}; [E, 2 I] and "
                             f"[E, {hidden}] are needed")
        if self.first_expert < 0 or self.first_expert + experts > self.router.shape[0]:
            raise ValueError(f"LayerWeights: experts {self.first_expert} to {self.first_expert + experts} of "
                             f"{self.router.shape[0]}; they must be among the router's")

    @property
    def local_experts(self) -> tuple[int, int]:
        return self.first_expert, self.first_expert + self.gate_up_bias.shape[0]


class Experts(NamedTuple):
    """What the two GEMMs need: matrices and fp32 biases of the experts held here, and the activation's constants."""

    gate_up: ExpertMatrices
    gate_up_bias: torch.Tensor
    down: ExpertMatrices
    down_bias: torch.Tensor
    alpha: float
    limit: float


def _cuda_align(tokens: int, form: str) -> int:
    return decode_cuda.TILE if tokens <= FEW_TOKENS or form == "mxfp4" else gemm_cuda.TILE_M


Rows = torch.Tensor | Quantised


def _placed(x: Rows, norm: torch.Tensor | None, eps: float, r: Routing) -> Quantised:
    """The rows of r's tokens in e4m3, sorted by expert. x: [T, H]; norm: [H] or None if x is normalised already."""
    if isinstance(x, Quantised):
        return place_rows(x, r.row_of, r.rows)
    return norm_quantise(x, norm, row_of=r.row_of, rows=r.rows, norm_eps=eps)


def _in_order(x: Rows, norm: torch.Tensor | None, eps: float) -> Quantised:
    """The rows in e4m3 in the order of their tokens, for a product that gathers them. x, norm: as of `_placed`."""
    if isinstance(x, Quantised):
        return x
    return norm_quantise(x, norm, norm_eps=eps, out=empty_quantised(*x.shape, x.device, by_row=True))


def _cuda_experts(
    x: Rows, norm: torch.Tensor | None, eps: float, r: Routing, e: Experts, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y [rows, H] bf16, down bias included. x, norm: as of `_placed`."""
    up, down, swiglu = e.gate_up, e.down, {"swiglu": True, "alpha": e.alpha, "limit": e.limit}
    if r.align == decode_cuda.TILE:
        q, scale = x if isinstance(x, Quantised) else r.quantised or norm_quantise(x, norm, norm_eps=eps)
        h, h_scale = decode_cuda.decode_gemm(q, scale, up, e.gate_up_bias, r, gather=True, overlapping=True, **swiglu)
        return decode_cuda.decode_gemm(h, h_scale, down, e.down_bias, r, overlapping=True)
    q, scale = _in_order(x, norm, eps)
    scale = place_scales(scale, r.token_of)
    h, h_scale = gemm_cuda.grouped_gemm(q, scale, up.values, up.scales, e.gate_up_bias, r.counts, token_of=r.token_of,
                                        **swiglu)
    return gemm_cuda.grouped_gemm(h, h_scale, down.values, down.scales, e.down_bias, r.counts)


def _deepgemm_experts(
    x: Rows, norm: torch.Tensor | None, eps: float, r: Routing, e: Experts, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y [rows, H] bf16 without the down bias, which rides in the combine."""
    q, scale = _placed(x, norm, eps, r)
    u = deepgemm.grouped_gemm(q, scale, e.gate_up.values, e.gate_up.scales, r.row_expert)
    h, h_scale = swiglu_quantise(u, r.row_expert, e.gate_up_bias, alpha=e.alpha, limit=e.limit)
    return deepgemm.grouped_gemm(h, h_scale, e.down.values, e.down.scales, r.row_expert)


def _triton_experts(
    x: Rows, norm: torch.Tensor | None, eps: float, r: Routing, e: Experts, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y [rows, H] in dtype (default: x's), down bias included; between the GEMMs fp32 is stored."""
    q, scale = _placed(x, norm, eps, r)
    tiles = (r.tile_expert, r.tile_rows)
    u = gemm_triton.grouped_gemm(q, scale, e.gate_up.values, e.gate_up.scales, e.gate_up_bias, *tiles,
                                 dtype=torch.float32)
    h, h_scale = swiglu_quantise(u, r.row_expert, alpha=e.alpha, limit=e.limit)
    return gemm_triton.grouped_gemm(h, h_scale, e.down.values, e.down.scales, e.down_bias, *tiles,
                                    dtype=dtype or x.dtype)


def _cuda_obstacle(expert_form: str | None = None, **needs: object) -> str | None:
    if expert_form not in decode_cuda.FORMS:
        return f"it takes expert_form 'fp8' or 'mxfp4'; it is {expert_form!r}"
    for axis in ("hidden_size", "intermediate_size"):
        size = needs.get(axis)
        if size is not None and (size % 64 or size > 4096):
            return f"it needs {axis} in multiples of 64 up to 4096; it is {size}"
    return gemm_cuda.obstacle(**needs)


def _triton_obstacle(
    device: torch.device | str | None = None, expert_form: str | None = None, **needs: object
) -> str | None:
    if expert_form != "fp8":
        return f"it takes expert_form 'fp8'; it is {expert_form!r}"
    if triton.knobs.runtime.interpret:
        return None
    if device is None or torch.device(device).type != "cuda":
        return "it needs an NVIDIA GPU, or the interpreter (TRITON_INTERPRET=1 before Triton is imported)"
    return None


def _few_or(align: int) -> Callable[[int, str], int]:
    return lambda tokens, form: 16 if tokens <= FEW_TOKENS else align


# backend: rank, obstacle, rows of a tile for (tokens, form), the experts, whether the down bias rides in the combine
_BACKENDS = {
    "cuda": (10, _cuda_obstacle, _cuda_align, _cuda_experts, False),
    "deepgemm": (20, deepgemm.obstacle, lambda tokens, form: gemm_cuda.TILE_M, _deepgemm_experts, True),
    "triton": (500, _triton_obstacle, _few_or(64), _triton_experts, False),
}


def _make_layer(backend: str) -> Callable[..., torch.Tensor]:
    _, _, align, experts, bias_in_combine = _BACKENDS[backend]

    def moe_layer(x: torch.Tensor, weights: LayerWeights, *, residual: bool = True,
                  num_tokens: torch.Tensor | None = None, out: torch.Tensor | None = None,
                  norm: NormInto | None = None, **precision) -> torch.Tensor:
        """x: [T, H], the residual stream, bf16 (triton: or fp32). precision: logits_dtype and weight_dtype of `route`.

        residual: add x. num_tokens: [1] int32 on the device, rows that are real; the others reach no expert. out:
        where the result goes, [T, H] in x's dtype, not x itself (default: new memory). norm: of the result, in e4m3.
        Returns [T, H] in x's dtype; padding rows are x, or 0 without residual.
        """
        w = weights
        if backend == "cuda" and norm is None and few_cuda.takes(x.shape[0], w, precision):
            made = router_logits(x, w.router, w.router_bias, w.norm, w.norm_eps)
            return few_cuda.few_experts(x, *made, w, residual=residual, num_tokens=num_tokens, out=out)
        rows = align(x.shape[0], w.gate_up.form)
        r = route(x, w.router, w.router_bias, experts_per_token=w.experts_per_token, norm_weight=w.norm,
                  norm_eps=w.norm_eps, align=rows, local_experts=w.local_experts, num_tokens=num_tokens,
                  quantise=backend == "cuda" and rows == decode_cuda.TILE, **precision)
        held = Experts(w.gate_up, w.gate_up_bias, w.down, w.down_bias, w.alpha, w.limit)
        y = experts(x, w.norm, w.norm_eps, r, held)
        bias = {"ids": r.ids, "bias": w.down_bias} if bias_in_combine else {}
        return combine(y, r.row_of, r.weights, residual=x if residual else None, first_local=w.first_expert,
                       dtype=x.dtype, out=out, norm=norm, **bias)

    return moe_layer


def _make_moe(backend: str) -> Callable[..., torch.Tensor]:
    _, _, align, experts, bias_in_combine = _BACKENDS[backend]

    def moe(x: Rows, ids: torch.Tensor, weights: torch.Tensor, gate_up: ExpertMatrices, gate_up_bias: torch.Tensor,
            down: ExpertMatrices, down_bias: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0,
            first_expert: int = 0, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
            ) -> torch.Tensor:
        """The experts alone, for choices made elsewhere; arguments as `reference.experts.moe`.

        x: [T, H], or quantised already, T rows or more. dtype: of the result for those, else it is x's. out: where the
        result goes, [T, H] (default: new memory). Returns [T, H].
        """
        held = Experts(gate_up, gate_up_bias.float(), down, down_bias.float(), alpha, limit)
        if not isinstance(x, Quantised):
            x, dtype = x.contiguous(), x.dtype
        r = place(ids, weights, gate_up.values.shape[0], first_expert=first_expert,
                  align=align(ids.shape[0], gate_up.form))
        y = experts(x, None, 0.0, r, held, dtype)
        bias = {"ids": r.ids, "bias": held.down_bias} if bias_in_combine else {}
        return combine(y, r.row_of, r.weights, first_local=first_expert, dtype=dtype, out=out, **bias)

    return moe


def choose_experts(
    x: torch.Tensor, weights: LayerWeights, **precision: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of `moe_layer` alone. x: [T, H], the residual stream. precision: as of `moe_layer`. Returns ids [T, k]
    int32 and weights [T, k]."""
    w = weights
    return choose(x, w.router, w.router_bias, experts_per_token=w.experts_per_token, norm_weight=w.norm,
                  norm_eps=w.norm_eps, **precision)


for _name, (_rank, _obstacle, *_) in _BACKENDS.items():
    register("moe_layer", _name, rank=_rank, obstacle=_obstacle)(_make_layer(_name))
    register("moe", _name, rank=_rank, obstacle=_obstacle)(_make_moe(_name))
    register("choose_experts", _name, rank=_rank, obstacle=_obstacle)(choose_experts)
moe_layer_cuda, moe_layer_deepgemm, moe_layer_triton = (_make_layer(name) for name in _BACKENDS)


@register("choose_experts", "reference", rank=1000)
def choose_experts_reference(
    x: torch.Tensor, weights: LayerWeights, *, logits_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch. x: [T, H]; returns ids [T, k] int64 and weights [T, k]."""
    w, wide = weights, torch.promote_types(x.dtype, torch.float32)
    logits = torch.nn.functional.linear(rms_norm(x, w.norm, w.norm_eps).to(wide), w.router.to(wide),
                                        w.router_bias.to(wide))
    if logits_dtype == torch.bfloat16:
        logits = logits.bfloat16()
    return reference_route(logits, w.experts_per_token, weight_dtype)


@register("moe_layer", "reference", rank=1000)
def moe_layer_reference(
    x: torch.Tensor, weights: LayerWeights, *, residual: bool = True, logits_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32, num_tokens: torch.Tensor | None = None, out: torch.Tensor | None = None,
    norm: NormInto | None = None,
) -> torch.Tensor:
    """Plain torch in x's dtype, activations not quantised; any weight form. x: [T, H]; returns [T, H] in x's dtype.

    num_tokens, out, norm: as in the other backends.
    """
    w = weights
    t = rms_norm(x, w.norm, w.norm_eps)
    ids, shares = choose_experts_reference(x, w, logits_dtype=logits_dtype, weight_dtype=weight_dtype)
    if num_tokens is not None:
        real = torch.arange(x.shape[0], device=x.device)[:, None] < num_tokens
        ids, shares = torch.where(real, ids, -1), torch.where(real, shares, 0)
    y = reference_moe(t, ids, shares, w.gate_up, w.gate_up_bias.to(x.dtype), w.down, w.down_bias.to(x.dtype),
                        alpha=w.alpha, limit=w.limit, first_expert=w.first_expert)
    y = x + y if residual else y
    if norm is not None:
        quantise_into(rms_norm(y, norm.weight, norm.eps), norm.into)
    return y if out is None else out.copy_(y)
