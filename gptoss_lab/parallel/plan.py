"""A plan: how one replica of the model is spread over GPUs, under the names that the post uses.

world = dp x tp ranks, rank = dp index * tp + tp index. Attention, embedding and head are cut over the `tp` ranks of a
data-parallel group and repeated in each of the `dp` groups, which serve different sequences. The experts belong to the
whole world: `ep` groups of adjacent ranks hold whole experts between them, and the world / ep ranks of one group hold
slices of the same experts. So "EP4 DP1 TP4" has every expert whole on one rank, "EP1 DP1 TP4" a quarter of every expert
on each, and "EP2 DP1 TP4" half of the experts in halves.

`sequence_split` (SP) is a further mark: the tp ranks then split the tokens of a step in place of the heads. Each holds
all of attention, and the two all-reduces of a layer become one gather and one reduce-scatter (see sequence.py).
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.errors import PlanError

_NAME = re.compile(r"EP(\d+)\s*DP(\d+)\s*TP(\d+)(\s*SP)?", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """ep, dp, tp: ways of expert, data and tensor parallelism; ep divides the world, dp x tp. PlanError otherwise."""

    ep: int = 1
    dp: int = 1
    tp: int = 1
    sequence_split: bool = False

    def __post_init__(self) -> None:
        for name in ("ep", "dp", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name} is {value!r}; a whole number of at least 1 is expected")
        if self.world % self.ep:
            raise PlanError(f"ep {self.ep} does not divide the {self.world} ranks of dp {self.dp} x tp {self.tp}")
        if self.sequence_split and self.tp == 1:
            raise PlanError("SP splits tokens over the tp ranks, and tp is 1; at least 2 are needed")

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.dp * self.tp

    @property
    def expert_slices(self) -> int:
        """Ranks that share one expert."""
        return self.world // self.ep

    @property
    def head_ways(self) -> int:
        """Ranks over which the attention heads are cut: tp, or 1 where tokens are split in their place."""
        return 1 if self.sequence_split else self.tp

    def __str__(self) -> str:
        return f"EP{self.ep} DP{self.dp} TP{self.tp}" + (" SP" if self.sequence_split else "")

    @classmethod
    def parse(cls, text: str) -> Plan:
        """A plan by its name: "EP4 DP1 TP4", blanks and case as you like, "SP" behind it for the split sequence."""
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"no plan is called {text!r}; a name such as EP4 DP1 TP4 is expected")
        ep, dp, tp, split = match.groups()
        return cls(int(ep), int(dp), int(tp), split is not None)


def obstacle(config: ModelConfig, plan: Plan) -> str | None:
    """Why `plan` cannot cut this model, in one line, or None if it can."""
    heads, kv = config.num_heads, config.num_kv_heads
    ways = plan.head_ways
    if heads % ways:
        return f"tp {plan.tp} does not divide the {heads} query heads of {config.name}"
    if kv % ways and ways % kv:
        return f"tp {plan.tp} and the {kv} key/value heads of {config.name}: neither divides the other"
    if plan.tp > config.vocab_size:
        return f"tp {plan.tp} exceeds the {config.vocab_size} vocabulary rows of {config.name}"
    if plan.ep > config.num_experts:
        return f"ep {plan.ep} exceeds the {config.num_experts} experts of {config.name}"
    return None


def check(config: ModelConfig, plan: Plan) -> Plan:
    """`plan`, or PlanError with the obstacle."""
    reason = obstacle(config, plan)
    if reason is not None:
        raise PlanError(f"{plan}: {reason}")
    return plan


def valid_plans(config: ModelConfig, world: int, sequence_split: bool = False) -> list[Plan]:
    """Every plan of a world of `world` ranks that can cut this model, by ep, then dp; `sequence_split`: with SP."""
    return [plan for plan, reason in _all(config, world, sequence_split) if reason is None]


def refused_plans(config: ModelConfig, world: int) -> dict[str, str]:
    """Name -> one line that says why, for every (ep, dp, tp) up to `world` each that is no plan of that world.

    dp x tp another number than the world is not listed: it is a plan of another world.
    """
    refused = {}
    for ep in range(1, world + 1):
        for dp in (n for n in range(1, world + 1) if world % n == 0):
            tp = world // dp
            name = f"EP{ep} DP{dp} TP{tp}"
            try:
                reason = obstacle(config, Plan(ep, dp, tp))
            except PlanError as error:
                reason = str(error)
            if reason is not None:
                refused[name] = reason
    return refused


def _all(config: ModelConfig, world: int, split: bool) -> list[tuple[Plan, str | None]]:
    if world < 1:
        raise PlanError(f"a world of {world} ranks; at least 1 is expected")
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    plans = [Plan(ep, dp, world // dp, split) for ep in divisors for dp in divisors if not split or dp < world]
    return [(plan, obstacle(config, plan)) for plan in plans]
