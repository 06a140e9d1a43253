"""The 32 published prefill rows, each beside the bound, our measured or modelled value, and the published system's fit.

"Ours" is measured where a row exists, else modelled by the engine's calibration, else by the kernels alone; the mark
says which, and a number that exists in none of these ways is said to be missing.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gptoss_lab.config import preset
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.estimate import Answer, Question, answers
from gptoss_lab.cost.performance import PerformanceModel, calibrate, kernels_alone, published_system
from gptoss_lab.cost.precision import SERVED
from gptoss_lab.cost.published import PublishedRow, read_published


@dataclass(frozen=True)
class Compared:
    """One published row. bound_s: seconds; ours: the best answer there is, with its mark; live: measured here, now, or
    None; refit_s: what the fit to the published rows gives for it."""

    row: PublishedRow
    bound_s: float
    ours: Answer
    refit_s: float
    live_s: float | None = None

    @property
    def published_over_bound(self) -> float:
        """How many times longer than the bound the published system took."""
        return self.row.latency_s / self.bound_s

    @property
    def published_over_ours(self) -> float | None:
        """How many times longer the published system took than ours; None where ours is missing."""
        return None if self.ours.seconds is None else self.row.latency_s / self.ours.seconds

    def usd(self, seconds: float | None) -> float | None:
        """Dollars per million input tokens at the published price of a GPU-hour."""
        return None if seconds is None else self.row.recomputed_usd_per_million(seconds)

    def table(self) -> dict[str, Any]:
        """One flat line with units in the names."""
        return {
            "model": self.row.model, "ep": self.row.plan.ep, "dp": self.row.plan.dp, "tp": self.row.plan.tp,
            "input_tokens": self.row.input_tokens, "published_s": self.row.latency_s, "bound_s": self.bound_s,
            "ours_s": self.ours.seconds, "ours_is": self.ours.name if self.ours.seconds else "missing",
            "live_s": self.live_s, "published_over_bound": self.published_over_bound,
            "published_over_ours": self.published_over_ours,
            "published_usd_per_million": self.row.usd_per_million_input_tokens,
            "recomputed_usd_per_million": self.usd(self.row.latency_s), "bound_usd_per_million": self.usd(self.bound_s),
            "ours_usd_per_million": self.usd(self.ours.seconds), "cost_agrees": self.row.agrees,
        }


def compare(
    rows: Iterable[Mapping[str, Any]], live: Mapping[tuple[str, str, int], float] | None = None
) -> list[Compared]:
    """The published rows in their order. rows: result rows (recorded). live: seconds by (model, plan, tokens)."""
    rows, post = list(rows), published_system()
    models = [calibrate(rows), kernels_alone(rows)]
    return [_compared(row, rows, models, post, live or {}) for row in read_published()]


def _compared(
    row: PublishedRow, rows: list[Mapping[str, Any]], models: list[PerformanceModel], post: PerformanceModel,
    live: Mapping[tuple[str, str, int], float],
) -> Compared:
    config = preset(row.model)
    question = Question(config, "prefill", row.input_tokens, 1, row.plan, SERVED)
    bound, measured, _, *modelled = answers(question, rows, models)
    known = [answer for answer in (measured, *modelled) if answer.seconds is not None]
    if bound.seconds is None:
        raise CostError(f"{row.model} {row.plan} has no bound")
    ours = known[0] if known else Answer("missing", "modelled", None, "; ".join(m.source for m in modelled))
    refit = post.seconds("prefill", config, row.input_tokens, 1, row.plan)
    return Compared(row, bound.seconds, ours, refit, live.get((row.model, str(row.plan), row.input_tokens)))
