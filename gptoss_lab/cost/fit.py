"""Least squares with coefficients that cannot be negative: every measurement is one line of a linear system.

Each line is divided by its measured seconds, so what is made small is the relative error, and a 20 us kernel counts as
much as a 20 s prefill. Columns may be nearly parallel (a launch per layer and a start of a layer always go together in
a whole pass); a very weak pull of every coefficient to its least value decides between them, and nothing else.

The active-set method of Lawson and Hanson (1974): free the column that would help most, solve, and fix again what
turned negative. It ends at the one optimum; `tests` check the optimality conditions.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gptoss_lab.cost.errors import CostError, check_positive

RIDGE = 1e-3        # weight of the pull, against lines of weight 1


@dataclass(frozen=True)
class Equation:
    """seconds = sum of coefficient x amount. amounts: by column. weight: of the line; held_out: whether no fit may see
    it. label and origin ('recorded', 'published') say what was measured and by whom."""

    label: str
    seconds: float
    amounts: Mapping[str, float]
    weight: float = 1.0
    held_out: bool = False
    origin: str = "recorded"

    def __post_init__(self) -> None:
        check_positive(f"seconds of {self.label}", self.seconds)
        check_positive(f"weight of {self.label}", self.weight)


@dataclass(frozen=True)
class Fit:
    """coefficients: by column. lines: how many training lines touch each column; 0 means nothing is known of it."""

    coefficients: Mapping[str, float]
    lines: Mapping[str, int] = field(default_factory=dict)

    def knows(self, amounts: Mapping[str, float]) -> bool:
        """Whether every column with an amount was touched by some line."""
        return not self._unknown(amounts)

    def seconds(self, amounts: Mapping[str, float]) -> float:
        """The fitted time. CostError if an amount belongs to a column that no line touched."""
        if unknown := self._unknown(amounts):
            raise CostError(f"no measurement to calibrate from touches {', '.join(unknown)}")
        return sum(value * amounts.get(name, 0.0) for name, value in self.coefficients.items())

    def _unknown(self, amounts: Mapping[str, float]) -> list[str]:
        return [name for name, amount in amounts.items()
                if amount and name in self.coefficients and not self.lines.get(name)]


def fit(equations: Sequence[Equation], names: Sequence[str], least: Mapping[str, float] | None = None) -> Fit:
    """Coefficients of `names` from the lines that are not held out; `least` gives lower limits (0 where absent).

    CostError if no line is left.
    """
    lines = [equation for equation in equations if not equation.held_out]
    if not lines:
        raise CostError("there is no measurement to calibrate from")
    low = np.array([(least or {}).get(name, 0.0) for name in names])
    weights = np.array([line.weight for line in lines])
    raw = np.array([[line.amounts.get(name, 0.0) for name in names] for line in lines])     # [lines, names]
    a = raw * (weights / [line.seconds for line in lines])[:, None]
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    system = np.vstack([a / scale, RIDGE * np.eye(len(names))])
    wanted = np.concatenate([weights - a @ low, np.zeros(len(names))])
    values = low + non_negative(system, wanted) / scale
    return Fit(dict(zip(names, map(float, values), strict=True)),
               {name: int((raw[:, n] > 0).sum()) for n, name in enumerate(names)})


def non_negative(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-12) -> np.ndarray:
    """x >= 0 that minimises |a x - b|. a: [lines, columns] of full column rank; b: [lines]."""
    free = np.zeros(a.shape[1], dtype=bool)
    x = np.zeros(a.shape[1])
    for _ in range(10 * a.shape[1]):
        gain = a.T @ (b - a @ x)
        candidates = np.flatnonzero(~free & (gain > tolerance))
        if not len(candidates):
            break
        free[candidates[np.argmax(gain[candidates])]] = True
        x = _solved(a, b, x, free)
    return x


def _solved(a: np.ndarray, b: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Least squares over the free columns; those that would turn negative stop at zero and are fixed (in `free`)."""
    while True:
        target = np.zeros_like(x)
        target[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        negative = free & (target <= 0)
        if not negative.any():
            return target
        step = min(x[n] / (x[n] - target[n]) if x[n] > 0 else 0.0 for n in np.flatnonzero(negative))
        x = x + step * (target - x)
        free &= ~(negative & (x <= 1e-15))
        x[~free] = 0.0
