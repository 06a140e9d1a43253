"""The whole MoE layer: hidden states in, hidden states out, one function per backend.

    out = x + sum_k weight_k * (down_k(swiglu(gate_up_k(RMSNorm(x)) + bias)) + bias)

Nothing synchronises with the host: buffers are sized for any routing, and every launch reads its sizes on the device,
so a layer can be captured in a CUDA graph. Launches of the `cuda` backend: routing 2, quantise 1, GEMM 2, combine 1.
Up to 128 tokens, or with MXFP4 weights, its GEMMs take the decode form; above, the tensor-core form with SwiGLU fused.
`choose("moe_layer", backend, device=..., form=..., hidden_size=..., intermediate_size=...)` decides once and says why.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from gptoss_kernels.moe import decode_cuda, deepgemm, gemm_cuda, gemm_triton
from gptoss_kernels.moe.combine import combine
from gptoss_kernels.moe.routing import FEW_TOKENS, Routing, route
from gptoss_kernels.quant import norm_quantise, swiglu_quantise
from gptoss_kernels.reference.experts import ExpertMatrices, moe
from gptoss_kernels.reference.moe import route as reference_route
from gptoss_kernels.reference.norm import rms_norm
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


def _route(x: torch.Tensor, w: LayerWeights, align: int, precision: dict) -> Routing:
    return route(x, w.router, w.router_bias, experts_per_token=w.experts_per_token, norm_weight=w.norm,
                 norm_eps=w.norm_eps, align=align, local_experts=w.local_experts, **precision)


def _combine(y: torch.Tensor, x: torch.Tensor, r: Routing, w: LayerWeights, residual: bool, bias: bool) -> torch.Tensor:
    return combine(y, r.row_of, r.weights, residual=x if residual else None, ids=r.ids if bias else None,
                   bias=w.down_bias if bias else None, first_local=w.first_expert, dtype=x.dtype)


@register("moe_layer", "cuda", rank=10, obstacle=lambda **needs: _cuda_obstacle(**needs))
def moe_layer_cuda(x: torch.Tensor, weights: LayerWeights, *, residual: bool = True, **precision) -> torch.Tensor:
    """Own Hopper kernels. x: [T, H] bf16, the residual stream. precision: logits_dtype, weight_dtype of `route`.

    residual: add x. Returns [T, H] bf16.
    """
    w, up, down = weights, weights.gate_up, weights.down
    swiglu = {"swiglu": True, "alpha": w.alpha, "limit": w.limit}
    if x.shape[0] <= FEW_TOKENS or w.gate_up.form == "mxfp4":
        r = _route(x, w, decode_cuda.TILE, precision)
        q, scale = norm_quantise(x, w.norm, norm_eps=w.norm_eps)
        h, h_scale = decode_cuda.decode_gemm(q, scale, up, w.gate_up_bias, r, gather=True, overlapping=True, **swiglu)
        y = decode_cuda.decode_gemm(h, h_scale, down, w.down_bias, r, overlapping=True)
    else:
        r = _route(x, w, gemm_cuda.TILE_M, precision)
        q, scale = norm_quantise(x, w.norm, row_of=r.row_of, rows=r.rows, norm_eps=w.norm_eps)
        h, h_scale = gemm_cuda.grouped_gemm(q, scale, up.values, up.scales, w.gate_up_bias, r.counts, **swiglu)
        y = gemm_cuda.grouped_gemm(h, h_scale, down.values, down.scales, w.down_bias, r.counts)
    return _combine(y, x, r, w, residual, bias=False)


def _cuda_obstacle(form: str = "fp8", **needs: object) -> str | None:
    if form not in decode_cuda.FORMS:
        return f"it takes weights of form 'fp8' or 'mxfp4'; these have {form!r}"
    for axis in ("hidden_size", "intermediate_size"):
        size = needs.get(axis)
        if size is not None and (size % 64 or size > 4096):
            return f"it needs {axis} in multiples of 64 up to 4096; it is {size}"
    return gemm_cuda.obstacle(**needs)


@register("moe_layer", "deepgemm", rank=20, obstacle=deepgemm.obstacle)
def moe_layer_deepgemm(x: torch.Tensor, weights: LayerWeights, *, residual: bool = True, **precision) -> torch.Tensor:
    """DeepGEMM with separate quantise, SwiGLU and combine kernels. Arguments as `moe_layer_cuda`."""
    w = weights
    r = _route(x, w, gemm_cuda.TILE_M, precision)
    q, scale = norm_quantise(x, w.norm, row_of=r.row_of, rows=r.rows, norm_eps=w.norm_eps)
    u = deepgemm.grouped_gemm(q, scale, w.gate_up.values, w.gate_up.scales, r.row_expert)
    h, h_scale = swiglu_quantise(u, r.row_expert, w.gate_up_bias, alpha=w.alpha, limit=w.limit)
    y = deepgemm.grouped_gemm(h, h_scale, w.down.values, w.down.scales, r.row_expert)
    return _combine(y, x, r, w, residual, bias=True)


def _triton_obstacle(device: torch.device | str | None = None, form: str = "fp8", **needs: object) -> str | None:
    if form != "fp8":
        return f"it takes weights of form 'fp8'; these have {form!r}"
    if triton.knobs.runtime.interpret:
        return None
    if device is None or torch.device(device).type != "cuda":
        return "it needs an NVIDIA GPU, or the interpreter (TRITON_INTERPRET=1 before Triton is imported)"
    return None


@register("moe_layer", "triton", rank=500, obstacle=_triton_obstacle)
def moe_layer_triton(x: torch.Tensor, weights: LayerWeights, *, residual: bool = True, **precision) -> torch.Tensor:
    """Plain Triton, also in the interpreter. x: [T, H] bf16 or fp32; otherwise as `moe_layer_cuda`."""
    w = weights
    r = _route(x, w, 16 if x.shape[0] <= FEW_TOKENS else 64, precision)
    q, scale = norm_quantise(x, w.norm, row_of=r.row_of, rows=r.rows, norm_eps=w.norm_eps)
    u = gemm_triton.grouped_gemm(q, scale, w.gate_up.values, w.gate_up.scales, w.gate_up_bias, r.tile_expert,
                                 r.tile_rows, dtype=torch.float32)
    h, h_scale = swiglu_quantise(u, r.row_expert, alpha=w.alpha, limit=w.limit)
    y = gemm_triton.grouped_gemm(h, h_scale, w.down.values, w.down.scales, w.down_bias, r.tile_expert, r.tile_rows,
                                 dtype=x.dtype)
    return _combine(y, x, r, w, residual, bias=False)


@register("moe_layer", "reference", rank=1000)
def moe_layer_reference(
    x: torch.Tensor, weights: LayerWeights, *, residual: bool = True, logits_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Plain torch in x's dtype, activations not quantised; any weight form. x: [T, H]; returns [T, H] in x's dtype."""
    w = weights
    t = rms_norm(x, w.norm, w.norm_eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = torch.nn.functional.linear(t.to(wide), w.router.to(wide), w.router_bias.to(wide))
    if logits_dtype == torch.bfloat16:
        logits = logits.bfloat16()
    ids, shares = reference_route(logits, w.experts_per_token, weight_dtype)
    out = moe(t, ids, shares, w.gate_up, w.gate_up_bias.to(x.dtype), w.down, w.down_bias.to(x.dtype), alpha=w.alpha,
              limit=w.limit, first_expert=w.first_expert)
    return x + out if residual else out
