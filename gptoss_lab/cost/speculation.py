"""Speculative decoding as arithmetic: a cheap model proposes k tokens, the expensive one checks them in one pass.

If each proposal is accepted with probability a, independently, a round yields 1 + a + ... + a^k tokens: the accepted
run and one token of the target's own. A round costs k draft steps and one verification, so

    speed-up = tokens per round x target step / (k x draft step + verification).

Two things spoil it for the 20B drafting for the 120B at small batch. The draft reads almost as many bytes per step as
the target, because 3.6 and 5.1 billion active parameters are a factor of 1.4 apart. And the verification is not free:
k + 1 tokens pick up to k + 1 times as many experts, whose weights must all be read (unlike in a dense model, which
reads the same weights for one token or five).

What is lost: acceptance is not independent from token to token, and neighbouring tokens share experts, so a
verification reads somewhat less than uniform routing says. The draft's own pass over the last accepted token is left
out.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.bounds import decode_bound, verify_bound
from gptoss_lab.cost.errors import CostError, check_count, check_fraction, check_positive
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import SERVED, Precision


@dataclass(frozen=True)
class StepSeconds:
    """target: one decode step of the target alone. draft: one of the draft. verify: one pass of the target over
    draft_tokens + 1 tokens. Seconds, all for the same batch and context."""

    target: float
    draft: float
    verify: float

    def __post_init__(self) -> None:
        for name in ("target", "draft", "verify"):
            check_positive(f"{name} step seconds", getattr(self, name))

    def with_shared_experts(self) -> StepSeconds:
        """The best that any routing could do: every verified token picks the experts of the first one, so a
        verification reads no more than a decode step and, waiting for memory, takes no longer."""
        return replace(self, verify=self.target)


def tokens_per_round(acceptance: float, draft_tokens: int) -> float:
    """Expected tokens of one round: 1 + a + ... + a^draft_tokens, for an acceptance a in [0, 1]."""
    check_fraction("acceptance", acceptance)
    return sum(acceptance**n for n in range(check_count("draft_tokens", draft_tokens) + 1))


def speedup(acceptance: float, draft_tokens: int, steps: StepSeconds) -> float:
    """How many times faster than plain decoding tokens arrive; below 1 speculation loses."""
    round_seconds = draft_tokens * steps.draft + steps.verify
    return tokens_per_round(acceptance, draft_tokens) * steps.target / round_seconds


def bound_steps(
    target: ModelConfig, draft: ModelConfig, context_tokens: int, draft_tokens: int, batch: int = 1,
    precision: Precision = SERVED, plan: Plan = SINGLE, hardware: Hardware = H200,
) -> StepSeconds:
    """The three step times at their bounds (parts one after the other); both models in one precision and plan."""
    common = {"batch": batch, "precision": precision, "plan": plan, "hardware": hardware}
    return StepSeconds(
        target=decode_bound(target, context_tokens, **common).sequential_seconds,
        draft=decode_bound(draft, context_tokens, **common).sequential_seconds,
        verify=verify_bound(target, context_tokens, draft_tokens, **common).sequential_seconds,
    )


def break_even_acceptance(draft_tokens: int, steps: StepSeconds, wanted_speedup: float = 1.0) -> float | None:
    """Smallest acceptance that reaches `wanted_speedup`; None if even accepting everything does not."""
    check_count("draft_tokens", draft_tokens, least=1)
    check_positive("wanted_speedup", wanted_speedup)
    if speedup(1.0, draft_tokens, steps) < wanted_speedup:
        return None
    low, high = 0.0, 1.0
    if speedup(low, draft_tokens, steps) >= wanted_speedup:
        return low
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, draft_tokens, steps) >= wanted_speedup else (middle, high)
    return high


def draft_seconds_that_pay(
    acceptance: float, draft_tokens: int, target_seconds: float, verify_seconds: float, wanted_speedup: float = 1.0
) -> float:
    """Longest draft step that still reaches `wanted_speedup`; 0 or less: no draft is fast enough."""
    check_count("draft_tokens", draft_tokens, least=1)
    check_positive("wanted_speedup", wanted_speedup)
    budget = tokens_per_round(acceptance, draft_tokens) * check_positive("target_seconds", target_seconds)
    return (budget / wanted_speedup - check_positive("verify_seconds", verify_seconds)) / draft_tokens


def draft_bytes_that_pay(
    acceptance: float, draft_tokens: int, target_seconds: float, verify_seconds: float, wanted_speedup: float = 1.0,
    hardware: Hardware = H200,
) -> float:
    """The same limit as bytes a draft step may read at full bandwidth: the size of a draft that would pay."""
    seconds = draft_seconds_that_pay(acceptance, draft_tokens, target_seconds, verify_seconds, wanted_speedup)
    return seconds * hardware.memory_bytes_per_second


def best_draft_tokens(
    acceptance: float, target: ModelConfig, draft: ModelConfig, context_tokens: int, longest: int = 16, batch: int = 1,
    precision: Precision = SERVED, plan: Plan = SINGLE, hardware: Hardware = H200,
) -> tuple[int, float]:
    """(draft length, speed-up) of the best length in 1..longest at the bounds; a speed-up below 1 says: do not."""
    check_count("longest", longest, least=1)
    gains = {
        k: speedup(acceptance, k, bound_steps(target, draft, context_tokens, k, batch, precision, plan, hardware))
        for k in range(1, longest + 1)
    }
    best = max(gains, key=lambda k: gains[k])
    return best, gains[best]


ONE_GPU = {"ep": 1, "dp": 1, "tp": 1}
"""The plan of a row that names none."""


def measured_step_seconds(
    rows: Iterable[Mapping[str, Any]], model: str, batch: int, tokens: int, **where: Any
) -> float:
    """Seconds of one measured decode step from result rows (suite 'decode', metric 'ms_per_step').

    where: further keys or conditions, such as backend=..., tp=...; a row of one GPU is meant unless it says otherwise.
    CostError unless exactly one row has a value.
    """
    wanted = {"suite": "decode", "metric": "ms_per_step", "model": model, "batch": batch, "tokens": tokens,
              **ONE_GPU, **where}
    found = [
        row for row in rows
        if row["value"] is not None
        and all(row.get(k, row["conditions"].get(k, ONE_GPU.get(k))) == v for k, v in wanted.items())
    ]
    if len(found) != 1:
        raise CostError(f"{len(found)} measured rows match {wanted}; exactly one is expected")
    return found[0]["value"] / 1e3
