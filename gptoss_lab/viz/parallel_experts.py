"""Whole experts (EP) or slices of all of them (TP): how many expert bytes the busiest rank reads in a decode step.

With slices every rank reads its part of every expert that was hit, so all read the same. With whole experts a rank
reads those of its own that were hit: as many on average, but the busiest rank has more, and all wait for it. With few
tokens that is a large difference; with many it vanishes, and whole experts keep large matrices and a short combine.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.parts import expert_bytes
from gptoss_lab.parallel import Plan, shares
from gptoss_lab.viz import style
from gptoss_lab.viz.moe_rows import sampled_ids
from gptoss_lab.viz.table import Table, table

DRAWS = 40
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def busiest_bytes(config: ModelConfig, plan: Plan, batch: int, draws: int = DRAWS, form: str = "fp8") -> float:
    """Expert bytes that the busiest rank reads in one layer, on average over random routings of `batch` tokens."""
    held = shares(config, plan)
    size = {len(s.expert_rows): sum(expert_bytes(config, form, len(s.expert_rows))) for s in held}
    total = 0.0
    for seed in range(draws):
        hit = set(sampled_ids(batch, config.num_experts, config.experts_per_token, seed=seed).flatten().tolist())
        total += max(size[len(s.expert_rows)] * len(hit & set(s.experts)) for s in held)
    return total / draws


def output_rows(config: ModelConfig, plan: Plan) -> float:
    """Rows that a rank's second product writes per token, on average: its combine reads them all again."""
    return config.experts_per_token * len(shares(config, plan)[0].experts) / config.num_experts


def figure(config: ModelConfig, plans: Sequence[Plan], batches: Sequence[int] = BATCHES) -> go.Figure:
    """Bytes of the busiest rank over an even share of what is hit, one line per plan."""
    fig = go.Figure()
    one = {batch: busiest_bytes(config, Plan(), batch) for batch in batches}
    ratios = {}
    for plan, colour in zip(plans, style.PALETTE, strict=False):
        ratios[plan] = [busiest_bytes(config, plan, b) * plan.world / one[b] for b in batches]
        fig.add_scatter(x=list(batches), y=ratios[plan], mode="lines+markers", name=str(plan), line={"color": colour},
                        hovertemplate="batch %{x}: %{y:.2f}<extra>" + str(plan) + "</extra>")
    fig.update_xaxes(type="log", title_text="tokens in the step", tickvals=list(batches),
                     ticktext=list(map(str, batches)))
    fig.update_yaxes(title_text="busiest rank / even share", rangemode="tozero")
    first, last = plans[0], plans[-1]
    return style.finish(
        fig, f"Batch {batches[0]}: {last} reads {ratios[last][0] / ratios[first][0]:.1f} times what {first} does; "
        f"batch {batches[-1]}: {ratios[last][-1] / ratios[first][-1]:.2f} times", "live",
        f"{config.name}, expert weights in FP8, {DRAWS} random routings of each size", height=420)


def comparison(config: ModelConfig, plans: Sequence[Plan]) -> Table:
    """What else differs: the matrices a rank multiplies, and rows its second product writes for each token."""
    lines = []
    for plan in plans:
        held = shares(config, plan)
        rows = sorted({len(s.expert_rows) for s in held}, reverse=True)
        matrices = " or ".join(f"{2 * r:,} x {config.hidden_size:,}" for r in rows)
        longest = max(rows) * plan.expert_slices / config.intermediate_size
        lines.append([str(plan), len(held[0].experts), matrices, f"{output_rows(config, plan):g}", f"{longest:.3f}",
                      "modelled"])
    return table(lines, ["plan", "experts on a rank", "gate/up matrix on a rank", "rows written per token",
                         "longest slice / even one", "origin"])
