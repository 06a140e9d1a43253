"""The one error of the cost model and the checks that raise it: a wrong input is named with its value and range."""
from __future__ import annotations

import math


class CostError(ValueError):
    """An input that no bound, memory or price can be computed from; the message says what would be right."""


def check_count(name: str, value: int, least: int = 0) -> int:
    """`value` if it is a whole number of at least `least`, else CostError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CostError(f"{name} is {value!r}; a whole number of at least {least} is expected")
    return value


def check_positive(name: str, value: float) -> float:
    """`value` if it is a finite number above zero, else CostError."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise CostError(f"{name} is {value!r}; a finite number above 0 is expected")
    return value


def check_fraction(name: str, value: float, *, above_zero: bool = False) -> float:
    """`value` if it lies in [0, 1] (in (0, 1] with `above_zero`), else CostError."""
    low_ok = value > 0 if above_zero else value >= 0
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (low_ok and value <= 1):
        raise CostError(f"{name} is {value!r}; a number in {'(0' if above_zero else '[0'}, 1] is expected")
    return value
