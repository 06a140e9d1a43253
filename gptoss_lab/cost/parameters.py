"""How many parameters the model has, and how many of them one token uses.

A token uses 4 experts per layer and everything else, so the count that decides decode speed is far below the total.
Model cards give the active count without the input embedding, of which a token reads a single row: 3.6 and 5.1
billion.
"""
from __future__ import annotations

from gptoss_lab.config import ModelConfig


def expert_weight_count(config: ModelConfig) -> int:
    """Weights of one expert: gate/up [2 I, H] and down [H, I]."""
    return 3 * config.hidden_size * config.intermediate_size


def expert_bias_count(config: ModelConfig) -> int:
    """Biases of one expert: 2 I and H."""
    return 2 * config.intermediate_size + config.hidden_size


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by group; their sum is the total."""
    layers, hidden, experts = config.num_layers, config.hidden_size, config.num_experts
    attention = hidden + config.qkv_size * (hidden + 1) + config.num_heads + hidden * (config.q_size + 1)
    return {
        "expert_weights": layers * experts * expert_weight_count(config),
        "expert_biases": layers * experts * expert_bias_count(config),
        "attention": layers * attention,
        "router": layers * experts * (hidden + 1),
        "norms": (layers + 1) * hidden,
        "embedding": config.vocab_size * hidden,
        "head": config.vocab_size * hidden,
    }


def active_parameter_count(config: ModelConfig, embedding: bool = False, head: bool = True) -> int:
    """Parameters that one token uses. embedding, head: whether the two vocabulary matrices count (as a whole)."""
    counts = parameter_counts(config)
    dense = counts["attention"] + counts["router"] + counts["norms"]
    expert = expert_weight_count(config) + expert_bias_count(config)
    chosen = config.num_layers * config.experts_per_token * expert
    return dense + chosen + embedding * counts["embedding"] + head * counts["head"]
