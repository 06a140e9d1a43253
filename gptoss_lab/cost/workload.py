"""One pass through the model, described by what enters it: sequences, new tokens, tokens already in the cache.

Prefill, decode and the verification of a draft are one computation with different numbers, so the parts are counted
once, for a `Workload`, and these three functions name the cases.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.cost.errors import check_count


@dataclass(frozen=True)
class Workload:
    """sequences: all of them, over all replicas of the attention. new_tokens, cached_tokens: of each sequence.
    sampled_tokens: positions of each sequence for which the head computes logits."""

    sequences: int
    new_tokens: int
    cached_tokens: int
    sampled_tokens: int

    def __post_init__(self) -> None:
        check_count("sequences", self.sequences, least=1)
        check_count("new_tokens", self.new_tokens, least=1)
        check_count("cached_tokens", self.cached_tokens)
        check_count("sampled_tokens", self.sampled_tokens)

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence after the pass."""
        return self.cached_tokens + self.new_tokens


def prefill(tokens: int, batch: int = 1, cached_tokens: int = 0) -> Workload:
    """`tokens` new prompt tokens in each of `batch` sequences, after `cached_tokens`; logits of the last one only."""
    return Workload(sequences=batch, new_tokens=tokens, cached_tokens=cached_tokens, sampled_tokens=1)


def decode(context_tokens: int, batch: int = 1) -> Workload:
    """One new token in each of `batch` sequences; it attends to `context_tokens` positions, its own included."""
    check_count("context_tokens", context_tokens, least=1)
    return Workload(sequences=batch, new_tokens=1, cached_tokens=context_tokens - 1, sampled_tokens=1)


def verify(context_tokens: int, draft_tokens: int, batch: int = 1) -> Workload:
    """A decode step that also checks `draft_tokens` proposed tokens per sequence; the first attends to `context_tokens`
    positions and all of them get logits."""
    check_count("context_tokens", context_tokens, least=1)
    rows = check_count("draft_tokens", draft_tokens) + 1
    return Workload(sequences=batch, new_tokens=rows, cached_tokens=context_tokens - 1, sampled_tokens=rows)


def full_pairs(work: Workload) -> int:
    """Query-key pairs of one sequence in a full causal layer."""
    return work.new_tokens * work.cached_tokens + work.new_tokens * (work.new_tokens + 1) // 2


def window_pairs(work: Workload, window: int) -> int:
    """Query-key pairs of one sequence in a sliding layer: each position sees at most `window`, itself included."""
    short = max(0, min(work.total_tokens, window) - work.cached_tokens)     # positions that see all before them
    first = work.cached_tokens + 1
    return short * (first + first + short - 1) // 2 + (work.new_tokens - short) * window
