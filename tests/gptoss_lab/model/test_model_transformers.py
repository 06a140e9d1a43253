"""The forward pass against transformers' GptOssForCausalLM in fp32: another implementation of the same model, its own
MXFP4 decoding included. The bound is 1e-5 of the largest logit."""
import dataclasses

import pytest
import torch
from random_models import Memory, config, distance, random_source, tokens
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gptoss_lab.config import RopeConfig
from gptoss_lab.model.load import build_model

BOUND = 1e-5
STRETCHED = RopeConfig(theta=10000.0, factor=4.0, beta_fast=4.0, beta_slow=1.0, original_context=256)
CASES = {
    "odd shapes, 7 windows": (config(), 50),
    "released window, longer than it": (
        config(num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=64, intermediate_size=32, num_experts=8,
               experts_per_token=4, sliding_window=128, num_layers=2), 300),
    "one key head, other rope": (
        config(num_heads=4, num_kv_heads=1, rope=STRETCHED, num_layers=3, max_position_embeddings=1024), 700),
    "rounded ramp": (config(rope=dataclasses.replace(STRETCHED, truncate=True), head_dim=64, num_layers=2,
               max_position_embeddings=1024), 700),
    "every expert chosen": (config(experts_per_token=5, num_layers=2), 30),
    "longer than 4096": (
        config(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=3, num_kv_heads=1, num_experts=4,
               experts_per_token=2, sliding_window=128), 4300),
}


def peer(source: Memory, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """The same weights in transformers, decoded by its own code."""
    raw = source.config.to_hf_dict()
    raw.pop("quantization_config")
    model = GptOssForCausalLM(GptOssConfig(**raw, attn_implementation="eager", experts_implementation="eager"))
    state = {}
    for name, value in source.tensors.items():
        if name.endswith("_blocks"):
            value = convert_moe_packed_tensors(value, source.tensors[name.replace("_blocks", "_scales")])
            state[name.removesuffix("_blocks")] = value
        elif not name.endswith("_scales"):
            state[name] = value
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()


@torch.inference_mode()
def peer_logits(source: Memory, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return peer(source, dtype)(ids[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    c, count = CASES[name]
    source, ids = random_source(c), tokens(c, count)
    ours = build_model(source, dtype=torch.float32)(ids, logits="all")
    assert ours.shape == (count, c.vocab_size)
    assert distance(ours, peer_logits(source, ids)) <= BOUND


def test_clamps():
    """Gate and up far beyond the limit on both sides; the peer's limit is fixed at 7."""
    c = config(num_layers=1)
    source = random_source(c).changed("model.layers.0.mlp.experts.gate_up_proj_bias", lambda bias: 40 * bias)
    ids = tokens(c, 40)
    ours = build_model(source, dtype=torch.float32)(ids, logits="all")
    assert distance(ours, peer_logits(source, ids)) <= BOUND
    unclamped = build_model(Memory(config(num_layers=1, swiglu_limit=1e6), source.tensors), dtype=torch.float32)
    assert distance(unclamped(ids, logits="all"), ours) > 0.1


@torch.inference_mode()
def test_decode_after_chunked_prefill():
    """The last token's logits after chunks of 23 and then token by token, against one pass of transformers."""
    c = config()
    source, ids = random_source(c, seed=3), tokens(c, 60)
    expected = peer_logits(source, ids)
    model = build_model(source, dtype=torch.float32)
    cache = model.new_cache(capacity=1)
    got = [model(part, caches=[cache]) for part in (ids[:23], ids[23:46], *ids[46:].split(1))]
    assert distance(torch.cat(got), expected[[22, 45, *range(46, 60)]]) <= BOUND


def test_bf16_is_as_good_as_the_peer():
    """bf16 logits, both measured against fp32: ours may not be further away than transformers' own bf16 forward."""
    c = config()
    ours, theirs = [], []
    for seed in range(3):
        source, ids = random_source(c, seed), tokens(c, 64, seed)
        exact = peer_logits(source, ids)
        for errors, got in (
            (ours, build_model(source, dtype=torch.bfloat16)(ids, logits="all")),
            (theirs, peer_logits(source, ids, torch.bfloat16)),
        ):
            errors.append(((got - exact).norm() / exact.norm()).item())
    assert sum(ours) <= sum(theirs), (ours, theirs)
    assert max(ours) <= 0.05
