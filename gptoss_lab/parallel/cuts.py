"""Where an axis is cut: evenly for heads, experts and vocabulary; at multiples of 128 for the inside of an expert.

2880 has 22.5 blocks of 128. Even eighths (360) would cut a block of FP8 scales and a group of activations in two on
almost every rank. Here all slices but the last are the same multiple of 128, chosen so that the longest slice is as
short as can be: 2880 becomes 1408 + 1472, 3 x 768 + 576, or 7 x 384 + 192. A short axis may leave ranks with nothing.
"""
from __future__ import annotations

from gptoss_lab.parallel.errors import PlanError

ALIGNMENT = 128


def even_ranges(length: int, ways: int) -> list[range]:
    """`ways` contiguous ranges of an axis, in order; the first `length % ways` are longer by one."""
    _check(length, ways)
    small, longer = divmod(length, ways)
    starts = [rank * small + min(rank, longer) for rank in range(ways + 1)]
    return [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def aligned_ranges(length: int, ways: int, alignment: int = ALIGNMENT) -> list[range]:
    """`ways` contiguous ranges of an axis, in order, that start at multiples of `alignment`; some may be empty.

    All but the last are equally long (as far as the axis reaches), the longest as short as possible.
    """
    _check(length, ways)
    steps = range(0, length + alignment, alignment)
    step = min(steps, key=lambda s: (max(min(s, length), length - (ways - 1) * s), -s))
    starts = [min(rank * step, length) for rank in range(ways)]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]


def _check(length: int, ways: int) -> None:
    if length < 1 or ways < 1:
        raise PlanError(f"an axis of {length} cannot be cut {ways} ways; both must be at least 1")
