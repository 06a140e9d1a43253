"""From a Hugging Face name to the rows of OpenAI's tensor that hold it, and back.

The two released layouts hold the same bytes under different names; only q, k and v are more than a renaming: they are
row ranges of one fused tensor. Expert bytes, gate/up interleaving and rotary order are equal in both.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import layer_of
from gptoss_lab.config import ModelConfig

_TOP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "unembedding.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "attn.norm.scale",
    "self_attn.sinks": "attn.sinks",
    "self_attn.o_proj.weight": "attn.out.weight",
    "self_attn.o_proj.bias": "attn.out.bias",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}


@dataclass(frozen=True)
class RowRange:
    """Rows start..stop-1 of the first axis of tensor `name`; stop None means the whole tensor."""

    name: str
    start: int = 0
    stop: int | None = None


def original_source(hf_name: str, config: ModelConfig) -> RowRange:
    """Where OpenAI's layout keeps the tensor `hf_name`; CheckpointError for a name that the released layout lacks."""
    if hf_name in _TOP:
        return RowRange(_TOP[hf_name])
    layer = layer_of(hf_name)
    prefix = f"model.layers.{layer}."
    if layer is not None and hf_name.startswith(prefix):
        rest = hf_name.removeprefix(prefix)
        if rest in _IN_LAYER:
            return RowRange(f"block.{layer}.{_IN_LAYER[rest]}")
        for projection, (start, stop) in qkv_rows(config).items():
            for part in ("weight", "bias"):
                if rest == f"self_attn.{projection}.{part}":
                    return RowRange(f"block.{layer}.attn.qkv.{part}", start, stop)
    raise CheckpointError(f"no tensor {hf_name} in the released layouts; Hugging Face names are expected")


def qkv_rows(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows of the fused QKV tensor: queries first, then keys, then values."""
    q, kv = config.q_size, config.kv_size
    return {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}


def hf_parts(original_name: str, config: ModelConfig) -> tuple[str, ...]:
    """The Hugging Face tensors that make up OpenAI's `original_name`, in row order."""
    for hf, original in _TOP.items():
        if original == original_name:
            return (hf,)
    layer = layer_of(original_name)
    prefix = f"block.{layer}."
    if layer is not None and original_name.startswith(prefix):
        rest, target = original_name.removeprefix(prefix), f"model.layers.{layer}."
        for hf, original in _IN_LAYER.items():
            if original == rest:
                return (target + hf,)
        if rest in ("attn.qkv.weight", "attn.qkv.bias"):
            return tuple(f"{target}self_attn.{p}.{rest.rsplit('.', 1)[1]}" for p in qkv_rows(config))
    raise CheckpointError(f"no tensor {original_name} in the original layout")
