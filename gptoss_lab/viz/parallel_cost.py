"""What exchanges cost a step: bytes over NVLink, and what each meeting costs whatever it carries.

A decode step's exchanges are small: their bytes cross in a fraction of a microsecond, and it is the meeting itself
that takes time. So two numbers are drawn for each plan: the time of the bytes at 450 GB/s, and `latency` microseconds
for each exchange, which is an assumption to move (`gptoss-lab bench comm` measures it).
"""
from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import decode_bound, prefill_bound
from gptoss_lab.cost import plan as cost_plan
from gptoss_lab.cost.hardware import H200
from gptoss_lab.parallel import Plan
from gptoss_lab.parallel.traffic import exchanges
from gptoss_lab.viz import style

LATENCY_US = 8.0        # the aim of bench comm for up to 8 rows


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step: memory and arithmetic bound, bytes over the link, meetings."""

    plan: Plan
    work: float
    link: float
    meetings: float

    @property
    def total(self) -> float:
        """All three, one after the other."""
        return self.work + self.link + self.meetings


def step_cost(config: ModelConfig, plan: Plan, tokens: int, batch: int, latency_us: float = LATENCY_US) -> StepCost:
    """Modelled times of a decode step of `batch` sequences at `tokens` tokens, or of a prefill (batch 0: one prompt).

    ValueError for a plan with a split sequence, whose bounds are not defined.
    """
    if plan.sequence_split:
        raise ValueError(f"{plan}: the bounds do not know the split sequence")
    same = cost_plan.Plan(plan.ep, plan.dp, plan.tp)
    bound = (decode_bound(config, tokens, batch, plan=same) if batch else prefill_bound(config, tokens, plan=same))
    rows = -(-batch // plan.dp) if batch else tokens
    found = exchanges(config, plan)
    received = sum(e.step_bytes * rows for e in found)
    work = max(bound.memory_seconds, bound.compute_seconds)
    return StepCost(plan, 1e3 * work, 1e3 * received / H200.link_bytes_per_second,
                    1e-3 * latency_us * sum(e.times for e in found))


def figure(
    config: ModelConfig, plans: list[Plan], tokens: int, batch: int, latency_us: float = LATENCY_US
) -> go.Figure:
    """Stacked bars of every plan's step."""
    costs = [step_cost(config, plan, tokens, batch, latency_us) for plan in plans]
    fig = go.Figure()
    for name, values, colour in (("weights, KV, arithmetic", [c.work for c in costs], style.BLUE),
                                 ("bytes over NVLink", [c.link for c in costs], style.OCHRE),
                                 (f"meetings at {latency_us:g} us", [c.meetings for c in costs], style.RED)):
        fig.add_bar(x=[str(c.plan) for c in costs], y=values, name=name, marker_color=colour,
                    hovertemplate="%{x}: %{y:.3g} ms<extra>" + name + "</extra>")
    fig.update_yaxes(title_text="ms of a step")
    fig.update_xaxes(showgrid=False, tickangle=-30)
    best = min(costs, key=lambda c: c.total)
    what = f"Decode, batch {batch} at {tokens:,} tokens" if batch else f"Prefill of {tokens:,} tokens"
    return style.finish(
        fig, f"{what}: least with {best.plan}, {best.total:.3g} ms, {100 * (1 - best.work / best.total):.0f} % of it "
        "exchanges", "modelled", f"{config.name}, FP8 experts; datasheet rates, nothing overlaps", barmode="stack",
        height=430, legend={"y": -0.5}, bargap=0.4)
