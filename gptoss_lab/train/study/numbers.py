"""Intervals and tests of the study, in closed form.

Tokens of one dialogue are not independent, so every mean over tokens is a ratio of sums over dialogues, and its
interval counts dialogues. Two models that answer the same problems are compared in pairs: McNemar's exact test looks
only at problems that exactly one of them gets right, and asks how often a fair coin falls so unevenly.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054
"""Of a normal distribution, 95 % lies within so many deviations."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p. gained: problems right only now; lost: right only before. 1 if there are none of either."""
    if gained < 0 or lost < 0:
        raise ValueError(f"{gained} gained and {lost} lost problems; neither can be negative")
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def paired_difference(gained: int, lost: int, count: int) -> Estimate:
    """Difference of two shares of the same `count` problems, with the normal interval of a paired difference."""
    if count < gained + lost or count < 1:
        raise ValueError(f"{gained} gained and {lost} lost of {count} problems; there must be at least as many")
    value = (gained - lost) / count
    half = Z * math.sqrt(max(0.0, gained + lost - (gained - lost) ** 2 / count)) / count
    return Estimate(value, value - half, value + half)


def mean_per_token(totals: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Sum of totals over sum of counts, one pair for each dialogue; normal interval of a ratio, clustered by dialogue.

    One dialogue alone says nothing of the spread: its interval is infinite.
    """
    n, tokens = len(totals), sum(counts)
    if n != len(counts) or not tokens:
        raise ValueError(f"{n} totals for {len(counts)} dialogues of {tokens} tokens; one each, and a token at least")
    value = math.fsum(totals) / tokens
    if n == 1:
        return Estimate(value, -math.inf, math.inf)
    squares = math.fsum((t - value * c) ** 2 for t, c in zip(totals, counts, strict=True))
    half = Z * math.sqrt(squares * n / (n - 1)) / tokens
    return Estimate(value, value - half, value + half)
