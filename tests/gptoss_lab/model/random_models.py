"""Small random models for the tests, held in memory under Hugging Face names: shapes chosen so that no two agree
by accident, weights large enough that every part of the model matters."""
from __future__ import annotations

import torch

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.stored import Dense, Mxfp4
from gptoss_lab.config import ModelConfig, RopeConfig


class Memory:
    """A source for `build_model`: tensors in a dict."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.tensors = config, dict(tensors)

    def tensor(self, name, device=None):
        return self.tensors[name]

    def linear(self, name, device=None):
        return Dense(self.tensors[f"{name}.weight"])

    def experts(self, layer, projection, *, device=None):
        name = f"model.layers.{layer}.mlp.experts.{projection}"
        return Mxfp4(self.tensors[f"{name}_blocks"], self.tensors[f"{name}_scales"])

    def changed(self, name, by):
        """The same with one tensor replaced by by(tensor)."""
        return Memory(self.config, self.tensors | {name: by(self.tensors[name].clone())})


def config(**changes) -> ModelConfig:
    """hidden 96, intermediate 160, 6 query heads on 2 key heads of 32, 5 experts top 3, window 7, 4 layers."""
    base = {
        "name": "random", "num_layers": 4, "num_experts": 5, "experts_per_token": 3, "hidden_size": 96,
        "intermediate_size": 160, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 131,
        "sliding_window": 7, "max_position_embeddings": 131072,
        "rope": RopeConfig(theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096),
        "eos_token_ids": (2,), "pad_token_id": 1,
    }
    return ModelConfig(**base | changes)


def random_source(c: ModelConfig, seed: int = 0) -> Memory:
    """Seeded bf16 tensors of a released form: MXFP4 experts, everything else bf16."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, std):
        return (torch.randn(*shape, generator=g) * std).bfloat16()

    h, i, e = c.hidden_size, c.intermediate_size, c.num_experts
    tensors = {
        "model.embed_tokens.weight": normal(c.vocab_size, h, std=1.0),
        "model.norm.weight": 1 + normal(h, std=0.2),
        "lm_head.weight": normal(c.vocab_size, h, std=h**-0.5),
    }
    for n in range(c.num_layers):
        place = f"model.layers.{n}."
        layer = {
            "input_layernorm.weight": 1 + normal(h, std=0.2),
            "post_attention_layernorm.weight": 1 + normal(h, std=0.2),
            "self_attn.sinks": normal(c.num_heads, std=1.0),
            "self_attn.o_proj.weight": normal(h, c.q_size, std=c.q_size**-0.5),
            "self_attn.o_proj.bias": normal(h, std=0.2),
            "mlp.router.weight": normal(e, h, std=h**-0.5),
            "mlp.router.bias": normal(e, std=0.3),
        }
        for x, rows in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)):
            layer[f"self_attn.{x}_proj.weight"] = normal(rows, h, std=h**-0.5)
            layer[f"self_attn.{x}_proj.bias"] = normal(rows, std=0.3)
        for x, out, into in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            weights = torch.randn(e, out, into, generator=g) * into**-0.5
            blocks, scales = mxfp4.encode(weights)[:2]
            layer[f"mlp.experts.{x}_blocks"], layer[f"mlp.experts.{x}_scales"] = blocks, scales
            layer[f"mlp.experts.{x}_bias"] = normal(e, out, std=0.3)
        tensors |= {place + name: value for name, value in layer.items()}
    return Memory(c, tensors)


def tokens(c: ModelConfig, count: int, seed: int = 0) -> torch.Tensor:
    """[count] int64 random ids."""
    return torch.randint(0, c.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference over largest absolute value of b."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
