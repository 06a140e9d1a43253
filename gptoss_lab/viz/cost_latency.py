"""What decides whether EP8 wins: the microseconds that a collective waits for each further rank.

A supposition turned like a knob: `collectives_by_extra_rank` is not known until four and eight GPUs are measured, so
the figure shows the winner of every speed goal as a function of it.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.sweep import EP_PLANS
from gptoss_lab.viz import style
from gptoss_lab.viz.cost_decode import COLOURS, charts, total_wins

MICROSECONDS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0)
GOALS = tuple(20 * 1.06**n for n in range(56))          # tokens/s per user, 20 to 493: fine enough for a smooth curve


def shares(
    model: PerformanceModel, configs: Sequence[ModelConfig], microseconds: Sequence[float] = MICROSECONDS,
    precision: Precision = FP8_EXPERTS,
) -> dict[float, dict[Plan, float]]:
    """Per supposed latency: the share of all speed goals of the four charts that each plan wins, in [0, 1]."""
    found = {}
    for wait in microseconds:
        supposed = model.supposing("decode", collectives_by_extra_rank=wait * 1e-6)
        won = total_wins(charts(supposed, configs, precision=precision), GOALS)
        found[wait] = {plan: won.get(plan, 0) / sum(won.values()) for plan in EP_PLANS}
    return found


def figure(found: dict[float, dict[Plan, float]], basis: str) -> go.Figure:
    """One line per plan."""
    fig = go.Figure()
    for plan in EP_PLANS:
        fig.add_scatter(x=list(found), y=[100 * by[plan] for by in found.values()], mode="lines+markers",
                        name=f"EP{plan.ep}", line={"color": COLOURS[plan]},
                        hovertemplate="%{x} us per rank: %{y:.0f} %<extra>" + str(plan) + "</extra>")
    fig.update_xaxes(title_text="supposed wait of a collective per rank beyond two, microseconds")
    fig.update_yaxes(title_text="speed goals won, %", rangemode="tozero")
    return style.finish(fig, headline(found), "modelled", f"{basis}; both models, 8,192 and 32,768 tokens", height=400)


def headline(found: dict[float, dict[Plan, float]]) -> str:
    """From which supposed latency on another plan than EP8 wins most often, and which."""
    for wait, by in found.items():
        best = max(by, key=lambda plan: by[plan])
        if best != EP_PLANS[-1]:
            return f"With {wait:g} us per rank and collective EP{best.ep} wins more speed goals than EP8"
    return "EP8 wins most speed goals whatever its ranks wait"
