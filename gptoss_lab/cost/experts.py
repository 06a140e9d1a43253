"""How many different experts a batch of tokens touches.

Each token picks k of E experts. If the picks are uniform and independent from token to token, an expert is missed by
all T tokens with probability (1 - k/E)^T, so E (1 - (1 - k/E)^T) are touched on average. This is what makes the MoE
of a small batch cost more bytes per step but fewer per token, and it saturates: beyond a few dozen tokens every
expert is read.

What is lost: real routers are not uniform and neighbouring tokens agree, so fewer experts are touched than this says.
"""
from __future__ import annotations

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import check_count


def expected_distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Expected number of different experts of one layer that `tokens` tokens pick, uniformly and independently."""
    check_count("tokens", tokens)
    missed = 1 - config.experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)
