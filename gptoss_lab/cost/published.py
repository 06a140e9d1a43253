"""The published prefill table: 32 rows of latency and cost, checked, explained and set against the bound.

Checked: cost follows from latency, GPUs and the price of a GPU-hour; every printed cost must lie within what the
printed latency (to half a millisecond) and the printed cost (to half a unit of its last digit) allow. Explained: with
one GPU the latencies follow b n + c n^2. b holds the matrix products, whose FLOPs per token are known; c holds full
attention; FLOPs over time give the rate that each ran at.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.cost.bounds import prefill_bound
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.parts import forward_parts
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import SERVED, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR, usd_per_million_tokens
from gptoss_lab.cost.tables import published_file, read_table
from gptoss_lab.cost.workload import prefill

SOURCE = "Perplexity, 'GPT-OSS on day 0', 2025-08-08"
LATENCY_ROUNDING_S = 0.0005
COST_ROUNDING_USD = 0.0005
_COLUMNS = ("model", "ep", "dp", "tp", "input_tokens", "latency_s", "usd_per_million_input_tokens")


@dataclass(frozen=True)
class PublishedRow:
    """One printed row: batch 1, FP8, H200. latency_s in seconds; the cost in dollars per million input tokens."""

    model: str
    plan: Plan
    input_tokens: int
    latency_s: float
    usd_per_million_input_tokens: float

    def recomputed_usd_per_million(self, latency_s: float | None = None) -> float:
        """The cost that follows from the printed latency (or from another one) at the published price of a GPU-hour."""
        seconds = self.latency_s if latency_s is None else latency_s
        return usd_per_million_tokens(seconds, self.input_tokens, self.plan.world, USD_PER_GPU_HOUR)

    @property
    def agrees(self) -> bool:
        """Whether some latency and some cost that round to the printed ones belong together."""
        low = self.recomputed_usd_per_million(self.latency_s - LATENCY_ROUNDING_S) - COST_ROUNDING_USD
        high = self.recomputed_usd_per_million(self.latency_s + LATENCY_ROUNDING_S) + COST_ROUNDING_USD
        return low <= self.usd_per_million_input_tokens <= high


def published_path() -> Path:
    """`data/published/prefill.csv` of this checkout."""
    return published_file("prefill.csv")


def read_published(path: str | Path | None = None) -> list[PublishedRow]:
    """The rows of the published table in file order. CostError names a file or line that is not as expected."""
    file = published_path() if path is None else Path(path)
    return read_table(file, _COLUMNS, _row, "the published table")


def beside_bound(
    row: PublishedRow, precision: Precision = SERVED, hardware: Hardware = H200
) -> dict[str, Any]:
    """One published row with the bound of the same prefill: seconds, ratio, and dollars at the bound.

    precision: of the bound; by default experts and projections in FP8. `published_s` carries the mark 'published', the
    bound's columns the mark 'modelled'.
    """
    limit = prefill_bound(preset(row.model), row.input_tokens, 1, precision, row.plan, hardware)
    return {
        "model": row.model, "plan": str(row.plan), "input_tokens": row.input_tokens,
        "published_s": row.latency_s, "published_usd_per_million": row.usd_per_million_input_tokens,
        "bound_s": limit.seconds, "limited_by": limit.limited_by, "published_over_bound": row.latency_s / limit.seconds,
        "bound_usd_per_million": row.recomputed_usd_per_million(limit.seconds),
    }


@dataclass(frozen=True)
class PrefillFit:
    """latency = b n + c n^2 for one GPU. worst_relative_error: over the fitted rows. The rates are in FLOP/s: of the
    matrix products (`linear`), of attention if window layers skip what they do not see, and if they do not."""

    model: str
    b_seconds_per_token: float
    c_seconds_per_token_squared: float
    worst_relative_error: float
    linear_flop_per_second: float
    attention_flop_per_second: float
    attention_flop_per_second_if_window_ran_full: float

    def seconds(self, tokens: float) -> float:
        """The fitted latency of a prefill of `tokens` tokens."""
        return self.b_seconds_per_token * tokens + self.c_seconds_per_token_squared * tokens**2


def fit_prefill(rows: list[PublishedRow], model: str) -> PrefillFit:
    """Fit the one-GPU rows of `model` by least squares of the relative error. CostError with fewer than three rows."""
    own = [row for row in rows if row.model == model and row.plan.world == 1]
    if len(own) < 3:
        raise CostError(f"{len(own)} one-GPU rows of {model}; a fit of two numbers needs at least 3")
    tokens = np.array([row.input_tokens for row in own], dtype=float)
    seconds = np.array([row.latency_s for row in own])
    relative = np.stack([tokens / seconds, tokens**2 / seconds], axis=1)        # [rows, 2]
    (b, c), *_ = np.linalg.lstsq(relative, np.ones(len(own)), rcond=None)
    linear, full = _flop_per_token(preset(model))
    return PrefillFit(
        model, float(b), float(c), float(np.abs(relative @ np.array([b, c]) - 1).max()),
        linear / float(b), full / float(c), 2 * full / float(c),
    )


def _flop_per_token(config: ModelConfig) -> tuple[float, float]:
    """(FLOP per token of the layers' matrix products, FLOP per squared token of the full layers' attention)."""
    one = {part.name: part.flop for part in forward_parts(config, prefill(1))}
    names = ("qkv_projection", "output_projection", "router", "experts_gate_up", "experts_down")
    return sum(one[name] for name in names), one["attention_full"] / 2


def _row(file: Path, number: int, raw: dict[str, str]) -> PublishedRow:
    try:
        return PublishedRow(
            model=preset(raw["model"]).name,
            plan=Plan(int(raw["ep"]), int(raw["dp"]), int(raw["tp"])),
            input_tokens=int(raw["input_tokens"]),
            latency_s=float(raw["latency_s"]),
            usd_per_million_input_tokens=float(raw["usd_per_million_input_tokens"]),
        )
    except (TypeError, ValueError) as error:
        raise CostError(f"{file.name}, line {number}: {error}") from None
