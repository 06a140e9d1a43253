"""The four decode charts: speed per user against dollars per million output tokens, one curve per EP1, EP2, EP4, EP8.

Each point is a batch. To the right users are faster, upwards tokens are dearer; the Pareto front is drawn as a band
behind the curves. Numbers come from a calibration of `gptoss_lab.cost.performance`, whose name is the subtitle.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR
from gptoss_lab.cost.sweep import EP_PLANS, GOALS, Candidate, pareto_front, sweep, winners, wins
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

CONTEXTS = (8192, 32768)
COLOURS = dict(zip(EP_PLANS, (style.BLUE, style.GREEN, style.OCHRE, style.RED), strict=True))
TICKS = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 3, 5))
MODELLED_ON = {"this engine": "this engine's rows", "kernels alone": "kernels timed alone, nothing between them"}


def charts(
    model: PerformanceModel, configs: Sequence[ModelConfig], contexts: Sequence[int] = CONTEXTS,
    usd_per_gpu_hour: float = USD_PER_GPU_HOUR, precision: Precision = FP8_EXPERTS,
) -> dict[tuple[str, int], list[Candidate]]:
    """The candidates of every chart, by (model name, context tokens)."""
    return {
        (config.name, context): sweep(model, config, "decode", context, usd_per_gpu_hour=usd_per_gpu_hour,
                                      precision=precision)
        for config in configs for context in contexts
    }


def figure(drawn: dict[tuple[str, int], list[Candidate]], model_name: str) -> go.Figure:
    """All charts of `charts` in a grid: models in rows, contexts in columns."""
    names = list(dict.fromkeys(name for name, _ in drawn))
    contexts = list(dict.fromkeys(context for _, context in drawn))
    fig = make_subplots(rows=len(names), cols=len(contexts), horizontal_spacing=0.09, vertical_spacing=0.16,
                        subplot_titles=[f"{name}, {context:,} tokens" for name in names for context in contexts])
    for (name, context), candidates in drawn.items():
        place = {"row": names.index(name) + 1, "col": contexts.index(context) + 1}
        add_front(fig, candidates, legend=place == {"row": 1, "col": 1}, **place)
        add_curves(fig, candidates, legend=place == {"row": 1, "col": 1}, **place)
    fig.update_annotations(font_size=13)
    fig.update_xaxes(title_text="tokens/s per user", rangemode="tozero")
    fig.update_yaxes(type="log", title_text="$ per million output tokens", tickvals=TICKS,
                     ticktext=[f"{tick:g}" for tick in TICKS])
    return style.finish(
        fig, headline(drawn), "modelled", f"{MODELLED_ON.get(model_name, model_name)}; batch 1 (right) to 128 (left)",
        height=340 * len(names) + 120, width=980, margin={"t": 110}, legend={"y": -0.12},
    )


def headline(drawn: dict[tuple[str, int], list[Candidate]]) -> str:
    """Which plan is the cheapest for most speed goals, over all charts together."""
    total = total_wins(drawn)
    plan, count = max(total.items(), key=lambda item: item[1])
    return f"EP{plan.ep} is the cheapest plan for {count} of {sum(total.values())} speed goals"


def total_wins(
    drawn: dict[tuple[str, int], list[Candidate]], goals: Sequence[float] = GOALS
) -> dict[Plan, int]:
    """For how many speed goals of all charts each plan is the cheapest."""
    every = [wins(candidates, goals) for candidates in drawn.values()]
    return {plan: sum(w[plan] for w in every) for plan in dict.fromkeys(p for w in every for p in w)}


def add_curves(
    fig: go.Figure, candidates: Iterable[Candidate], legend: bool, row: int | None = None, col: int | None = None
) -> None:
    """One line per plan; batches that do not fit into memory are left out of it."""
    by_plan: dict[Plan, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.memory.fits:
            by_plan.setdefault(candidate.plan, []).append(candidate)
    for plan, points in by_plan.items():
        fig.add_scatter(
            x=[c.speed for c in points], y=[c.usd for c in points], mode="lines+markers", row=row, col=col,
            name=f"EP{plan.ep}" if plan in COLOURS else str(plan), legendgroup=str(plan), showlegend=legend,
            line={"color": COLOURS.get(plan, style.GREY), "width": 1.6}, marker={"size": 6},
            customdata=[(c.batch, 1e3 * c.point.step_seconds, c.point.tokens_per_second) for c in points],
            hovertemplate="batch %{customdata[0]}: %{customdata[1]:.2f} ms per step, %{x:.0f} tokens/s per user,<br>"
                          "%{customdata[2]:,.0f} tokens/s in all, $%{y:.3f} per million<extra>" + f"{plan}</extra>")


def add_front(
    fig: go.Figure, candidates: Iterable[Candidate], legend: bool, row: int | None = None, col: int | None = None
) -> None:
    """The Pareto front as a broad pale line."""
    front = pareto_front(candidates)
    fig.add_scatter(x=[c.speed for c in front], y=[c.usd for c in front], mode="lines", name="Pareto front", row=row,
                    col=col, line={"color": "#d5dce3", "width": 11}, hoverinfo="skip", showlegend=legend,
                    legendgroup="front")


def winners_table(drawn: dict[tuple[str, int], list[Candidate]], goals: Sequence[float] = GOALS) -> Table:
    """The cheapest plan and batch per speed goal, one line per goal and one column per chart."""
    best = {key: winners(candidates, goals) for key, candidates in drawn.items()}
    lines = [[f"{goal:g}", *(_won(best[key].get(goal)) for key in drawn)] for goal in goals]
    return table(lines, ["tokens/s per user", *(f"{name.removeprefix('gpt-oss-')}, {c:,}" for name, c in drawn)])


def _won(candidate: Candidate | None) -> str:
    if candidate is None:
        return "not reached"
    return f"EP{candidate.plan.ep}, batch {candidate.batch}, ${candidate.usd:.2f}"
