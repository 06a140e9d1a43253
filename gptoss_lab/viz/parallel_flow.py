"""One layer of a plan as lanes: what every rank computes, and between the steps what moves, with the bytes."""
from __future__ import annotations

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel import Plan, shares
from gptoss_lab.parallel.traffic import Exchange, exchanges
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

STEPS = ("norm, QKV", "attention", "output projection", "norm, router", "experts", "residual")
# After which step each exchange of a layer happens.
AFTER = {"keys and values": 0, "attention": 2, "dispatch": 3, "combine": 4}
COLOURS = {"keys and values": style.PURPLE, "attention": style.RED, "dispatch": style.GREEN, "combine": style.OCHRE}


def layer_exchanges(config: ModelConfig, plan: Plan) -> list[Exchange]:
    """The exchanges inside a full layer, in their order (the embedding's is none of them, and the halo is the sliding
    layers')."""
    inside = [e for e in exchanges(config, plan) if e.name in AFTER and e.token_bytes]
    return sorted(inside, key=lambda e: AFTER[e.name])


def groups(plan: Plan, axis: str) -> list[list[int]]:
    """The ranks that meet in an exchange over an axis, group by group."""
    if axis == "world":
        return [list(range(plan.world))]
    if axis == "tp":
        return [[d * plan.tp + t for t in range(plan.tp)] for d in range(plan.dp)]
    return [[d * plan.tp + t for d in range(plan.dp)] for t in range(plan.tp)]


def shown_bytes(count: float) -> str:
    """For example 11.5 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def counted(tokens: int) -> str:
    """For example "1 token" or "8,192 tokens"."""
    return "1 token" if tokens == 1 else f"{tokens:,} tokens"


def figure(config: ModelConfig, plan: Plan, tokens: int) -> go.Figure:
    """A layer of a step with `tokens` tokens in each data-parallel group: lanes are ranks, bars are exchanges.

    The number at an exchange is what each rank receives in it, averaged over the ranks.
    """
    fig = go.Figure()
    found = layer_exchanges(config, plan)
    for step, name in enumerate(STEPS):
        for rank in range(plan.world):
            fig.add_shape(type="rect", x0=step - 0.28, x1=step + 0.28, y0=rank - 0.28, y1=rank + 0.28, line_width=0,
                          fillcolor=style.PALETTE[(rank // plan.tp) % len(style.PALETTE)], opacity=0.85)
        fig.add_annotation(x=step, y=-0.75, text=name, showarrow=False, font={"size": 11})
    for rank, share in enumerate(shares(config, plan)):
        rows = "" if len(share.expert_rows) == config.intermediate_size else f" x {len(share.expert_rows)}"
        for step, text in ((1, f"{len(share.heads)} heads"), (4, f"{len(share.experts)} experts{rows}")):
            fig.add_annotation(x=step, y=rank, text=text, showarrow=False, font={"size": 9, "color": "white"})
    received = 0.0
    at_same = {name: sum(e.name == name for e in found) for name in AFTER}
    seen: dict[str, int] = {}
    for exchange in found:
        seen[exchange.name] = seen.get(exchange.name, 0) + 1
        spread = 0.16 * (seen[exchange.name] - (at_same[exchange.name] + 1) / 2)
        _arrow(fig, plan, exchange, AFTER[exchange.name] + 0.5 + spread, tokens, seen[exchange.name])
        received += exchange.token_bytes * tokens
    fig.add_scatter(x=[None], y=[None], showlegend=False)
    fig.update_xaxes(range=[-0.5, len(STEPS) - 0.5], visible=False)
    below = 0.75 if seen.get("combine", 0) > 1 else 0.2
    fig.update_yaxes(range=[plan.world + below, -1.05], tickvals=list(range(plan.world)), showgrid=False,
                     ticktext=[f"rank {rank}" for rank in range(plan.world)], showline=False, ticks="")
    kind = "exchange" if len(found) == 1 else "exchanges"
    return style.finish(
        fig, f"{plan}: {len(found)} {kind} in a layer, {shown_bytes(received)} received by a rank", "modelled",
        f"{config.name}, a full layer, {counted(tokens)} in each data-parallel group (one colour each), bf16",
        height=190 + 52 * plan.world, margin={"b": 20})


def _arrow(fig: go.Figure, plan: Plan, exchange: Exchange, x: float, tokens: int, number: int) -> None:
    """A vertical bar through the ranks that meet, with the bytes below it."""
    colour = COLOURS[exchange.name]
    for index, members in enumerate(groups(plan, exchange.axis)):
        at = x + (0.05 * (index - (plan.tp - 1) / 2) if exchange.axis == "dp" else 0)
        fig.add_scatter(x=[at] * len(members), y=members, mode="lines+markers", showlegend=False,
                        line={"color": colour, "width": 3}, marker={"size": 9, "color": colour},
                        hovertemplate=f"{exchange.name}: {exchange.kind} over {exchange.axis}<extra></extra>")
    label = f"{exchange.kind}<br>{shown_bytes(exchange.token_bytes * tokens)}"
    fig.add_annotation(x=x, y=plan.world - 0.45 + 0.55 * ((number - 1) % 2), yanchor="top", text=label,
                       showarrow=False, font={"size": 10, "color": colour})


def exchange_table(config: ModelConfig, plans: list[Plan], tokens: int) -> Table:
    """Every exchange of a step: over whom, how often, what a rank receives, and the time of that at 450 GB/s."""
    lines = []
    for plan in plans:
        for e in exchanges(config, plan):
            size = e.times * (e.token_bytes * tokens + e.sequence_bytes)
            lines.append([str(plan), e.name, e.kind, f"{e.axis}, {e.ranks}", e.times, shown_bytes(size),
                          f"{1e6 * size / 450e9:,.1f}", "modelled"])
    return table(lines, ["plan", "exchange", "kind", "over", "times", "received by a rank", "us at 450 GB/s", "origin"])
