"""How many different experts a batch of tokens touches.

Each token picks k of E experts. If the picks are uniform and independent from token to token, an expert is missed by
all T tokens with probability (1 - k/E)^T, so E (1 - (1 - k/E)^T) are touched on average. This is what makes the MoE
of a small batch cost more bytes per step but fewer per token, and it saturates: beyond a few dozen tokens every
expert is read.

Where groups of ranks hold different experts, the one with the most of them touched keeps the others waiting, in every
layer. How many it has follows if each expert is touched or not independently of the others; for one token, whose k
picks are k in all, it is a little too many.

What is lost: real routers are not uniform and neighbouring tokens agree, so fewer experts are touched than this says.
"""
from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import comb

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import check_count


def expected_distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Expected number of different experts of one layer that `tokens` tokens pick, uniformly and independently."""
    check_count("tokens", tokens)
    missed = 1 - config.experts_per_token / config.num_experts
    return config.num_experts * (1 - missed**tokens)


def expected_fullest_experts(config: ModelConfig, tokens: int, groups: int) -> float:
    """Expected number of different experts that `tokens` tokens pick in that of `groups` equal groups where it is most.
    """
    check_count("groups", groups, least=1)
    if groups == 1:
        return expected_distinct_experts(config, tokens)
    share = expected_distinct_experts(config, tokens) / config.num_experts
    return _fullest(-(-config.num_experts // groups), share, groups)


@lru_cache(maxsize=4096)
def _fullest(each: int, share: float, groups: int) -> float:
    """Expected largest of `groups` binomial counts of `each` trials that succeed with probability `share`."""
    exactly = (comb(each, n) * share**n * (1 - share) ** (each - n) for n in range(each))
    return sum(1 - at_most**groups for at_most in accumulate(exactly))
