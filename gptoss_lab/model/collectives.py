"""How the ranks that share a model exchange what they have: handed in, and nothing at all where one rank holds it all.

A rank holds some heads, some experts and some rows of the vocabulary (`gptoss_lab.parallel.Share`), and after each of
these the parts must be added up or put side by side. Tokens may differ between ranks too: then the experts' inputs are
brought to the ranks that need them, and their sums back. A bias that every rank would add is loaded on one rank only,
so a plain sum is right everywhere. `gptoss_lab.parallel.PlanCollectives` does all this for a plan.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gptoss_lab.parallel.sequence import SequenceSplit


class Collectives(Protocol):
    """What a model asks of its ranks. T: this rank's new tokens; T': the tokens that its experts see.

    may_idle: whether a step without any token of its own makes sense here, because other ranks have some.
    """

    may_idle: bool

    def start(self, lengths: Sequence[int], keep: bool, device: torch.device) -> SequenceSplit | None:
        """A step begins with lengths[b] new tokens of each sequence; keep: into caches.

        Returns which of these tokens this rank computes, None for all of them.
        """
        ...

    def reduce_embedding(self, part: torch.Tensor) -> torch.Tensor:
        """[all new tokens, H], zero where a token's row lies on another rank -> [T, H], summed over the ranks."""
        ...

    def reduce_attention(self, part: torch.Tensor) -> torch.Tensor:
        """[T, H] of this rank's heads -> [T, H], the sum over the ranks that share the heads."""
        ...

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Own tokens [T, H], their experts and weights [T, k] -> the same of the T' tokens that experts here see."""
        ...

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """[T', H] of this rank's experts -> [T, H], the sum over the ranks that share the experts, own tokens only."""
        ...

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, this rank's vocabulary rows] -> [B, V], or as it is for a sampler that works on shards."""
        ...


class OneRank:
    """One rank holds all heads, all experts and the vocabulary: nothing to add, nothing to fetch."""

    may_idle = False

    def start(self, lengths: Sequence[int], keep: bool, device: torch.device) -> None:
        """All tokens are computed here."""

    def reduce_embedding(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, H] as it is."""
        return part

    def reduce_attention(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, H] as it is."""
        return part

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three as they are."""
        return x, ids, weights

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, H] as it is."""
        return part

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [B, V] as they are."""
        return logits
