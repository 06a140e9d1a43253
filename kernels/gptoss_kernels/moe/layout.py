"""Where the rows of each expert lie: sorted by expert, every expert's rows starting at a multiple of the tile height.

A grouped GEMM wants the rows of one expert side by side, and each tile of rows to belong to one expert, so that a tile
needs one weight. The price is padding: half a tile per expert that was hit, on average. The sizes of the buffers must
not depend on the routing (the host never learns it), so they are bounds over every possible routing.

Plain integers only: the kernels compute the same on the device, and the tests compare the two.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupLayout:
    """sizes, aligned, starts: rows, padded rows and first row of each expert. total: padded rows of all."""

    sizes: tuple[int, ...]
    aligned: tuple[int, ...]
    starts: tuple[int, ...]
    total: int


def group_layout(sizes: Sequence[int], align: int) -> GroupLayout:
    """Lay groups one after the other, each padded to a multiple of `align` rows; an empty group takes no row."""
    if align < 1:
        raise ValueError(f"group_layout: rows are aligned to {align}; a positive number is needed")
    if any(size < 0 for size in sizes):
        raise ValueError(f"group_layout: a group has {min(sizes)} rows; none may be negative")
    aligned = [-(-size // align) * align for size in sizes]
    starts, at = [], 0
    for rows in aligned:
        starts.append(at)
        at += rows
    return GroupLayout(tuple(sizes), tuple(aligned), tuple(starts), at)


def max_tiles(tokens: int, experts_per_token: int, num_experts: int, align: int) -> int:
    """Most tiles of `align` rows that any routing of `tokens` can need.

    Every expert that is hit wastes at most align - 1 rows, and no more experts are hit than there are rows.
    """
    rows = tokens * experts_per_token
    hit = min(num_experts, rows)
    return (rows + hit * (align - 1)) // align


def padding_share(sizes: Sequence[int], align: int) -> float:
    """Padded rows over real rows, minus one: what the alignment costs in tensor-core work for these group sizes."""
    real = sum(sizes)
    if real == 0:
        raise ValueError("padding_share: all groups are empty; at least one row is needed")
    return group_layout(sizes, align).total / real - 1
