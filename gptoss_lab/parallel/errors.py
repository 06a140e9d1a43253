"""The errors of this package, each one line: what was wrong, the value, what would be right."""
from __future__ import annotations


class PlanError(ValueError):
    """A plan that cannot exist, or cannot cut the model at hand."""


class RankError(RuntimeError):
    """A rank that died, hung or disagreed with the others; the message names it. rank: its number, None if unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
