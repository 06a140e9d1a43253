"""A plan as a picture: which part of every axis each rank holds."""
from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel import Plan, PlanError, Share, shares
from gptoss_lab.parallel.plan import check
from gptoss_lab.parallel.traffic import kv_token_bytes, read_bytes
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

PARTS = ("query heads", "key/value heads", "experts", "rows of an expert", "vocabulary")


def parts(config: ModelConfig, share: Share) -> list[tuple[str, range, int]]:
    """(what, which of them are here, how many there are) for the five axes that a plan cuts."""
    axes = ((share.heads, config.num_heads), (share.kv_heads, config.num_kv_heads),
            (share.experts, config.num_experts), (share.expert_rows, config.intermediate_size),
            (share.vocabulary, config.vocab_size))
    return [(name, span, size) for name, (span, size) in zip(PARTS, axes, strict=True)]


def figure(config: ModelConfig, plan: Plan) -> go.Figure:
    """One line per rank, one column per axis: a bar where the rank holds that part of the axis."""
    held = shares(config, plan)
    fig = make_subplots(rows=1, cols=len(PARTS), shared_yaxes=True, subplot_titles=PARTS, horizontal_spacing=0.04)
    for rank, share in enumerate(held):
        colour = style.PALETTE[rank % len(style.PALETTE)]
        for column, (name, span, size) in enumerate(parts(config, share), 1):
            text = f"{span.start}–{span.stop - 1}" if len(span) else "none"
            shown = text if len(span) > 0.045 * len(text) * size else ""
            fig.add_bar(
                x=[len(span) / size], base=[span.start / size], y=[f"rank {rank}"], orientation="h", row=1, col=column,
                marker_color=colour, text=shown, textposition="inside", textangle=0,
                insidetextanchor="middle", textfont={"color": "white", "size": 10}, showlegend=False,
                hovertemplate=f"rank {rank}: {name} {text}, {len(span)} of {size}<extra></extra>")
    fig.update_xaxes(range=[0, 1], tickvals=[1], showgrid=False, tickfont={"size": 11})
    for column, (_, _, size) in enumerate(parts(config, held[0]), 1):
        fig.update_xaxes(ticktext=[f"{size:,}"], row=1, col=column)
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_annotations(font_size=12)
    most = max(read_bytes(config, share) for share in held)
    return style.finish(
        fig, f"{plan}: at most {most / 1e9:.1f} GB on a rank, of {read_bytes(config, whole(config)) / 1e9:.1f}",
        "modelled", f"{config.name}, FP8 experts, the rest bf16; bars are what a rank reads from the checkpoint",
        barmode="overlay", bargap=0.25, height=150 + 30 * plan.world, margin={"t": 104})


def whole(config: ModelConfig) -> Share:
    """The share of one rank alone."""
    return shares(config, Plan())[0]


def described(config: ModelConfig, ep: int, dp: int, tp: int, split: bool = False) -> go.Figure | str:
    """`figure` for a widget, or in a line why there is no such plan."""
    try:
        return figure(config, check(config, Plan(ep, dp, tp, split)))
    except PlanError as error:
        return str(error)


def plans_table(config: ModelConfig, plans: list[Plan]) -> Table:
    """One line per plan: bytes of the fullest rank, how even the ranks are, KV bytes, whole experts or slices."""
    lines = []
    for plan in plans:
        held = shares(config, plan)
        read = [read_bytes(config, share) for share in held]
        rows = sorted({len(s.expert_rows) for s in held}, reverse=True)
        lines.append([
            str(plan), f"{max(read) / 1e9:.2f}", f"{max(read) * plan.world / sum(read):.3f}",
            kv_token_bytes(config, plan, held[0]) * config.num_layers,
            f"{max(len(s.experts) for s in held)} x {' or '.join(map(str, rows))}", "modelled"])
    return table(lines, ["plan", "GB on the fullest rank", "fullest / mean", "KV bytes of a token, all layers",
                         "experts x rows on a rank", "origin"])
