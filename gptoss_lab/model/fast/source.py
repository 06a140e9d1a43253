"""Weights that are laid out already, as a source for the plain model: so that both compute with the very same numbers.

What a fast forward is checked against is the plain one in fp32 over these tensors. Experts are shared, not copied;
the rest is small, or is widened to fp32 by whoever asks.
"""
from __future__ import annotations

import torch

from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_lab.checkpoint import Dense, Fp8, Mxfp4, Stored
from gptoss_lab.model.fast.weights import FastWeights, Projection


class LaidOut:
    """A `Source` (model/load.py) over FastWeights, by Hugging Face names; device arguments are not needed."""

    def __init__(self, weights: FastWeights) -> None:
        self.weights, self.config = weights, weights.config

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A tensor outside the large matrices. KeyError for one that the model does not have."""
        w = self.weights
        whole = {"model.embed_tokens.weight": w.embedding, "model.norm.weight": w.norm, "lm_head.weight": w.unembedding}
        return whole[name] if name in whole else self._in_layer(*_place(name))

    def linear(self, name: str, device: torch.device | None = None) -> Dense | Fp8:
        """q_proj, k_proj, v_proj (rows of the fused QKV) or o_proj; `name` without ".weight"."""
        layer, part = _place(name)
        kind = part.removeprefix("self_attn.").removesuffix("_proj")
        if kind == "o":
            return _stored(self.weights.layers[layer].out)
        return _stored(self.weights.layers[layer].qkv).slice_rows(*self._rows(kind))

    def experts(self, layer: int, projection: str, *, device: torch.device | None = None) -> Stored:
        """The matrices of a layer's experts; projection is "gate_up_proj" or "down_proj"."""
        moe = self.weights.layers[layer].moe
        return _experts(moe.gate_up if projection == "gate_up_proj" else moe.down)

    def _rows(self, kind: str) -> tuple[int, int]:
        q, kv = self.config.q_size, self.config.kv_size
        return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}[kind]

    def _in_layer(self, n: int, name: str) -> torch.Tensor:
        layer = self.weights.layers[n]
        if name.startswith("self_attn.") and name.endswith("_proj.bias") and "o_proj" not in name:
            return layer.qkv.bias[slice(*self._rows(name[len("self_attn.")]))]
        moe = layer.moe
        return {
            "input_layernorm.weight": layer.attention_norm, "self_attn.sinks": layer.sinks,
            "self_attn.o_proj.bias": layer.out.bias, "post_attention_layernorm.weight": moe.norm,
            "mlp.router.weight": moe.router, "mlp.router.bias": moe.router_bias,
            "mlp.experts.gate_up_proj_bias": moe.gate_up_bias, "mlp.experts.down_proj_bias": moe.down_bias,
        }[name]


def _place(name: str) -> tuple[int, str]:
    """"model.layers.3.mlp.router.bias" -> 3, "mlp.router.bias"."""
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4:
        raise KeyError(f"laid-out weights have no tensor {name}")
    return int(parts[2]), parts[3]


def _stored(projection: Projection) -> Dense | Fp8:
    if projection.scale_inv is None:
        return Dense(projection.weight)
    return Fp8(projection.weight, projection.scale_inv)


def _experts(matrices: ExpertMatrices) -> Stored:
    if matrices.form == "mxfp4":
        return Mxfp4(matrices.values, matrices.scales)
    return Dense(matrices.values) if matrices.form == "dense" else Fp8(matrices.values, matrices.scales)
