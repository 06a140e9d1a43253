"""A trained model under the names, and in the forms, of the released checkpoint."""
from __future__ import annotations

import torch

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.names import qkv_rows
from gptoss_lab.train.model import TrainedModel

_IN_LAYER = {
    "attention_norm": "input_layernorm.weight", "out": "self_attn.o_proj.weight", "out_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks", "moe_norm": "post_attention_layernorm.weight", "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias", "gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "down_bias": "mlp.experts.down_proj_bias",
}


@torch.no_grad()
def released_tensors(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor on the CPU: bf16, experts as MXFP4 blocks and scales, compact vocabulary rows."""

    def rounded(name: str) -> torch.Tensor:
        return model.get_parameter(name).detach().to(torch.bfloat16).cpu()

    tensors = {
        "model.embed_tokens.weight": rounded("embedding"), "model.norm.weight": rounded("norm"),
        "lm_head.weight": rounded("unembedding"),
    }
    for n in range(model.config.num_layers):
        ours, theirs = f"layers.{n}.", f"model.layers.{n}."
        for name, released in _IN_LAYER.items():
            tensors[theirs + released] = rounded(ours + name)
        for projection, (start, stop) in qkv_rows(model.config).items():
            for part, name in (("weight", "qkv"), ("bias", "qkv_bias")):
                tensors[f"{theirs}self_attn.{projection}.{part}"] = rounded(ours + name)[start:stop]
        for name, released in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            blocks, scales = mxfp4.encode(model.get_parameter(ours + name).detach().cpu(), ours + name)
            tensors[f"{theirs}mlp.experts.{released}_blocks"] = blocks
            tensors[f"{theirs}mlp.experts.{released}_scales"] = scales
    return tensors
