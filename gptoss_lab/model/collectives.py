"""How the ranks that share a model add up their parts: handed in, and a no-op where one rank holds everything.

Three places in a layer need other ranks. After the output projection each rank holds the part of its heads. Before the
experts a rank may have to see tokens of other replicas, and after them each rank holds the part of its experts. A bias
that every rank would add is loaded on one rank only, so a plain sum is right everywhere.
"""
from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """What a layer asks of its ranks. T: this rank's new tokens; T': the tokens that its experts see."""

    def reduce_attention(self, part: torch.Tensor) -> torch.Tensor:
        """[T, H] of this rank's heads -> [T, H], the sum over the ranks that share the heads."""
        ...

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T', H]: the tokens that this rank's experts must see, its own and perhaps other replicas'."""
        ...

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """[T', H] of this rank's experts -> [T, H], the sum over the ranks that share the experts, own tokens only."""
        ...


class OneRank:
    """One rank holds all heads and all experts: nothing to add, nothing to fetch."""

    def reduce_attention(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, H] as it is."""
        return part

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] as it is."""
        return x

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """part [T, H] as it is."""
        return part
