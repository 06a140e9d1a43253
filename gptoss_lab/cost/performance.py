"""The performance model: seconds of any pass under any plan, from what was measured, with its error stated.

What: per phase (prefill, decode) one linear model. Its columns are what a pass asks of each kind of kernel (`columns`);
its coefficients come from measurements (`fit`); its error from measurements that no fit saw (`holdout`).

Three calibrations share this form and must not be confused; `basis` says which one a number comes from.
    calibrate(rows)      this project's engine: rows of data/measured
    published_system()   the system of the post: its 32 prefill rows, and nothing about decode
    kernels_alone(rows)  kernels timed alone, added up: no engine around them, and nothing of a launch that overlaps

Where rows are too few the model refuses in a sentence instead of guessing.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.cost.columns import COLUMNS, EXPERTS, FACTORS, LATENCIES, LEAST, PROJECTIONS, columns
from gptoss_lab.cost.equations import (
    ENGINE,
    KERNEL_WEIGHT,
    ceiling_equations,
    engine_rows,
    kernel_equations,
    pass_equation,
)
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.figures import kernel_equation, read_figures
from gptoss_lab.cost.fit import Equation, Fit, fit
from gptoss_lab.cost.holdout import held_out
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, SERVED, Precision
from gptoss_lab.cost.published import SOURCE, PublishedRow, read_published
from gptoss_lab.cost.workload import decode, prefill

PHASES = ("prefill", "decode")
FEWEST_PASSES = 4
_OPTIONAL = ("link_one_shot", "collectives_by_extra_rank")        # other forms of what `link`, `collectives` say
_NOT_IN_KERNELS = ("link_one_shot", "layers", "collectives_by_extra_rank", "passes")
_BY_FIGURES = {"collectives": "all-reduces", "gathers": "gathers"}     # taken from figures where no row says anything
_FIGURES = {"prefill": ("prefill_", "product_fp8", "all_reduce"), "decode": ("decode_", "all_reduce")}
_WORK = {"prefill": prefill, "decode": decode}


@dataclass(frozen=True)
class Checked:
    """One held-out measurement beside its prediction, both in seconds."""

    label: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class PassModel:
    """The model of one phase. groups: columns that share a coefficient, by the group's name. checked: the held-out
    whole passes. equations: every measurement, held out or not, its amounts by group. own_rows: as of `columns`."""

    phase: str
    fit: Fit
    groups: Mapping[str, tuple[str, ...]]
    checked: tuple[Checked, ...] = ()
    equations: tuple[Equation, ...] = ()
    own_rows: bool = True

    def breakdown(
        self, config: ModelConfig, tokens: int, batch: int = 1, plan: Plan = SINGLE, precision: Precision = FP8_EXPERTS
    ) -> dict[str, float]:
        """Seconds of one pass by group; their sum is the prediction. tokens: new ones (prefill) or context (decode).

        CostError if the pass needs a column that no measurement touched.
        """
        asked = columns(config, _WORK[self.phase](tokens, batch), precision, plan, own_rows=self.own_rows)
        amounts = grouped(asked, self.groups)
        self.fit.seconds(amounts)
        return {name: value * amounts[name] for name, value in self.fit.coefficients.items()}

    def seconds(
        self, config: ModelConfig, tokens: int, batch: int = 1, plan: Plan = SINGLE, precision: Precision = FP8_EXPERTS
    ) -> float:
        """Predicted seconds of one pass; see `breakdown`."""
        return sum(self.breakdown(config, tokens, batch, plan, precision).values())

    def changed(self, **coefficients: float) -> PassModel:
        """The same model with some coefficients replaced, or columns added, by supposition; its error is not known."""
        groups = {**self.groups, **{name: (name,) for name in coefficients if name in COLUMNS}}
        if unknown := set(coefficients) - set(groups):
            raise CostError(f"no coefficient is called {', '.join(sorted(unknown))}; there are {', '.join(groups)}")
        lines = {**self.fit.lines, **{name: max(1, self.fit.lines.get(name, 0)) for name in coefficients}}
        return replace(self, fit=Fit({**self.fit.coefficients, **coefficients}, lines), groups=groups, checked=())

    @property
    def median_error(self) -> float | None:
        """Median relative error over the held-out measurements; None without any."""
        return median(c.relative_error for c in self.checked) if self.checked else None

    @property
    def worst_error(self) -> float | None:
        """Largest relative error over the held-out measurements; None without any."""
        return max((c.relative_error for c in self.checked), default=None)

    def error_sentence(self) -> str:
        """How good the model is, in a sentence."""
        if not self.checked:
            return f"no held-out {self.phase} row has been measured yet, so the error is not known"
        return (f"{len(self.checked)} held-out {self.phase} rows: median error {100 * self.median_error:.1f} %, "
                f"worst {100 * self.worst_error:.1f} % ({self._worst().label})")

    def _worst(self) -> Checked:
        return max(self.checked, key=lambda c: c.relative_error)


@dataclass(frozen=True)
class PerformanceModel:
    """One calibration. name and basis: whose times these are. passes: by phase; missing: why a phase has no model."""

    name: str
    basis: str
    passes: Mapping[str, PassModel]
    missing: Mapping[str, str] = field(default_factory=dict)
    precision: Precision = FP8_EXPERTS

    def of(self, phase: str) -> PassModel:
        """The model of a phase; CostError with the reason where there is none."""
        if phase not in PHASES:
            raise CostError(f"phase is {phase!r}; one of {', '.join(PHASES)} is expected")
        if phase not in self.passes:
            raise CostError(f"{self.name}: {self.missing.get(phase, f'no {phase} model')}")
        return self.passes[phase]

    def seconds(
        self, phase: str, config: ModelConfig, tokens: int, batch: int = 1, plan: Plan = SINGLE,
        precision: Precision | None = None,
    ) -> float:
        """Predicted seconds of one prefill or one decode step; precision: by default the calibration's own."""
        return self.of(phase).seconds(config, tokens, batch, plan, precision or self.precision)

    def supposing(self, phase: str, **coefficients: float) -> PerformanceModel:
        """The same calibration with some coefficients of a phase replaced: a what-if, and named so."""
        passes = {**self.passes, phase: self.of(phase).changed(**coefficients)}
        changes = ", ".join(f"{name} = {value:.3g}" for name, value in coefficients.items())
        return replace(self, name=f"{self.name}, supposing", basis=f"{self.basis}; supposing {changes}", passes=passes)


def calibrate(rows: Iterable[Mapping[str, Any]], engine: str = ENGINE) -> PerformanceModel:
    """This project's engine, from result rows. engine: what the backend of its rows begins with.

    A phase with fewer than FEWEST_PASSES whole passes outside the held-out ones gets no model but a sentence. While no
    row outside them has a sum over ranks in it, or a gather, these are taken from figures of two GPUs, and `basis` says
    so.
    """
    rows = list(rows)
    passes, missing, basis = {}, {}, "calibrated on data/measured"
    for phase in PHASES:
        whole = [pass_equation(row) for row in engine_rows(rows, phase, engine)]
        seen = sum(not line.held_out for line in whole)
        if seen < FEWEST_PASSES:
            missing[phase] = _too_few(phase, seen, len(whole) - seen)
            continue
        lines = [*whole, *kernel_equations(rows, phase)]
        touched = _touched(lines)
        if noted := [what for column, what in _BY_FIGURES.items() if column not in touched]:
            lines += [line for line in _figures(("all_reduce",), KERNEL_WEIGHT) if touched.isdisjoint(line.amounts)]
            basis = f"calibrated on data/measured, {' and '.join(noted)} on figures of two GPUs without raw readings"
        names = [name for name in COLUMNS if name not in _OPTIONAL or _told_apart(name, lines)]
        passes[phase] = _pass_model(phase, lines, whole, {name: (name,) for name in names})
    return PerformanceModel("this engine", basis, passes, missing)


def published_system(rows: Iterable[PublishedRow] | None = None) -> PerformanceModel:
    """The system of the post, from its prefill table. Its rows say nothing about decode, so that phase is missing.

    Four numbers: matrix products, attention, the bytes each rank reads from the others, and a time per layer.
    """
    groups = {"matrix products": (*PROJECTIONS, *EXPERTS), "attention": ("attention_full", "attention_window"),
              "link": ("link_one_shot",), "layers": ("layers",)}
    lines = [_published_equation(row) for row in (read_published() if rows is None else rows)]
    return PerformanceModel(
        "the published system", f"{SOURCE}: a fit to its prefill table",
        {"prefill": replace(_pass_model("prefill", lines, lines, groups), own_rows=False)},
        {"decode": "its decode charts were not published as numbers"}, SERVED,
    )


def kernels_alone(rows: Iterable[Mapping[str, Any]]) -> PerformanceModel:
    """The sum of kernels that were timed alone: recorded rows, and figures whose readings were not kept, of other
    engines' kernels, for what no row says.

    What an engine adds between kernels is not in it (no time per layer or pass, no start that nobody timed), and
    collectives on four or eight GPUs are extrapolated from two. Whole passes of the engine are not used; the held-out
    ones say how far off this is.
    """
    rows = list(rows)
    passes = {}
    for phase in PHASES:
        recorded = kernel_equations(rows, phase, weight=1.0)
        known = _touched(recorded) - set(LATENCIES)
        lines = [*recorded, *ceiling_equations(rows, phase),
                 *(line for line in _figures(_FIGURES[phase], 1.0) if known.isdisjoint(_touched([line])))]
        touched = _touched(lines)
        names = [name for name in COLUMNS if name in FACTORS or name in touched]
        whole = [line for row in engine_rows(rows, phase) if (line := pass_equation(row)).held_out]
        passes[phase] = _pass_model(phase, lines, whole, {n: (n,) for n in names if n not in _NOT_IN_KERNELS})
    return PerformanceModel("kernels alone", "kernels timed alone, added up; nothing between them", passes)


def first_able(
    models: Iterable[PerformanceModel], phases: Iterable[str], configs: Iterable[ModelConfig],
    precision: Precision = FP8_EXPERTS,
) -> PerformanceModel:
    """The first of `models` that can predict these phases of these models, on one GPU and on eight.

    CostError with every reason if none can.
    """
    wanted = [(phase, config, plan) for phase in phases for config in configs for plan in (SINGLE, Plan(8, 1, 8))]
    reasons = []
    for model in models:
        try:
            for phase, config, plan in wanted:
                model.seconds(phase, config, 1024, 1, plan, precision)
        except CostError as error:
            reasons.append(str(error) if model.name in str(error) else f"{model.name}: {error}")
            continue
        return model
    raise CostError("; ".join(reasons) or "there is no model to choose from")


def grouped(amounts: Mapping[str, float], groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Amounts of columns added up by group."""
    return {group: sum(amounts.get(name, 0.0) for name in names) for group, names in groups.items()}


def _pass_model(
    phase: str, lines: list[Equation], whole: list[Equation], groups: Mapping[str, tuple[str, ...]] | None = None
) -> PassModel:
    """Fit the lines and predict the held-out ones among the whole passes, but for those the model would refuse."""
    groups = groups or {name: (name,) for name in COLUMNS}
    own = [Equation(line.label, line.seconds, grouped(line.amounts, groups), line.weight, line.held_out, line.origin)
           for line in lines]
    least = {group: max(LEAST.get(name, 0.0) for name in names) for group, names in groups.items()}
    found = fit(own, list(groups), least)
    checked = tuple(
        Checked(line.label, line.seconds, found.seconds(amounts)) for line in whole
        if line.held_out and found.knows(amounts := grouped(line.amounts, groups))
    )
    return PassModel(phase, found, groups, checked, tuple(own))


def _published_equation(row: PublishedRow) -> Equation:
    return Equation(
        f"{row.model} {row.plan}, {row.input_tokens} tokens", row.latency_s,
        columns(preset(row.model), prefill(row.input_tokens), SERVED, row.plan, own_rows=False),
        held_out=held_out(row.input_tokens, 1, row.plan.world), origin="published",
    )


def _figures(beginnings: tuple[str, ...], weight: float) -> list[Equation]:
    """Lines of the figures whose quantity begins so."""
    lines = [kernel_equation(figure) for figure in read_figures() if figure.quantity.startswith(beginnings)]
    return [replace(line, weight=weight) for line in lines if line is not None]


def _touched(lines: Iterable[Equation]) -> set[str]:
    """Columns with an amount in some line that is not held out."""
    return {name for line in lines if not line.held_out for name, amount in line.amounts.items() if amount}


def _told_apart(optional: str, lines: Iterable[Equation]) -> bool:
    """Whether the lines that the fit sees say anything of an optional column: between two ranks one shot moves just
    what `link` counts, so such lines alone would share the cost among the two at random and charge it twice beyond."""
    return any(line.amounts.get(optional, 0) not in (0, line.amounts.get("link")) for line in lines
               if not line.held_out)


def _too_few(phase: str, seen: int, held: int) -> str:
    """The sentence for a phase with too few rows."""
    count = f"{seen or 'no'} {phase} row{'s' if seen != 1 else ''} of the fast engine"
    besides = f" besides {held} held out" if held else ""
    return f"{count} {'has' if seen == 1 else 'have'} been measured yet{besides}; a fit needs at least {FEWEST_PASSES}"
