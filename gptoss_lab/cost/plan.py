"""How a replica is spread over GPUs, and the largest share that one of them holds.

world = dp x tp. Attention, embedding and head are cut over `tp` and repeated `dp` times, each copy serving its part of
the batch. The experts belong to the whole world: `ep` groups of ranks hold whole experts, and the world / ep ranks of a
group hold slices of them, cut at multiples of 128 so that no block of scales is cut. "EP4" in the post is EP4 DP1 TP4.

A step ends when its slowest rank ends, so a share is always the largest one: the longest slice of an expert, the fuller
half of an odd batch. That is also why N GPUs need more than 1/N of the bytes each.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import CostError, check_count

SLICE_ALIGNMENT = 128


@dataclass(frozen=True)
class Plan:
    """ep, dp, tp: ways of expert, data and tensor parallelism. `ep` divides the world, dp x tp."""

    ep: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("ep", "dp", "tp"):
            check_count(name, getattr(self, name), least=1)
        if self.world % self.ep:
            raise CostError(f"ep {self.ep} does not divide the {self.world} GPUs of dp {self.dp} x tp {self.tp}")

    @property
    def world(self) -> int:
        """GPUs of one replica."""
        return self.dp * self.tp

    @property
    def expert_slices(self) -> int:
        """Ranks that share one expert."""
        return self.world // self.ep

    def __str__(self) -> str:
        return f"EP{self.ep} DP{self.dp} TP{self.tp}"


SINGLE = Plan()


@dataclass(frozen=True)
class Shares:
    """The largest share of one GPU. heads, kv_heads: attention heads. experts: whole or sliced experts.
    expert_rows: length of the slice of the expert axis. vocab_rows: rows of the embedding and of the head."""

    heads: int
    kv_heads: int
    experts: int
    expert_rows: int
    vocab_rows: int


def shares(config: ModelConfig, plan: Plan) -> Shares:
    """What the fullest GPU of `plan` holds. CostError if `plan` cannot cut this model."""
    if config.num_heads % plan.tp:
        raise CostError(f"tp {plan.tp} does not divide the {config.num_heads} query heads of {config.name}")
    if plan.ep > config.num_experts:
        raise CostError(f"ep {plan.ep} exceeds the {config.num_experts} experts of {config.name}")
    return Shares(
        heads=config.num_heads // plan.tp,
        kv_heads=-(-config.num_kv_heads // plan.tp),
        experts=-(-config.num_experts // plan.ep),
        expert_rows=largest_slice(config.intermediate_size, plan.expert_slices),
        vocab_rows=-(-config.vocab_size // plan.tp),
    )


def largest_slice(length: int, ways: int, alignment: int = SLICE_ALIGNMENT) -> int:
    """Longest of `ways` slices of an axis when all but the last are the same multiple of `alignment`, chosen so that
    the longest is as short as can be: 2880 gives 1472, 768, 384 for 2, 4, 8 ways."""
    blocks = -(-length // alignment)
    return min(max(min(length, c * alignment), length - (ways - 1) * c * alignment) for c in range(blocks + 1))


def all_plans(world: int) -> list[Plan]:
    """Every (ep, dp, tp) for `world` GPUs, in order of ep, then dp."""
    check_count("world", world, least=1)
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return [Plan(ep, dp, world // dp) for ep in divisors for dp in divisors]
