"""The tokens of a prompt over the ranks: which pieces each takes, how even the work is, and what must travel for it."""
from __future__ import annotations

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel import Plan
from gptoss_lab.parallel.sequence import Segment, split_tokens
from gptoss_lab.parallel.traffic import exchanges
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def in_order(length: int, ranks: int) -> list[list[Segment]]:
    """The naive split: rank r takes the r-th part."""
    edges = [length * n // ranks for n in range(ranks + 1)]
    return [[Segment(0, edges[n], edges[n + 1])] for n in range(ranks)]


def causal_pairs(segments: list[Segment]) -> int:
    """Query-key pairs of a full causal layer for these tokens."""
    return sum((s.start + 1 + s.stop) * (s.stop - s.start) // 2 for s in segments)


def imbalance(split: list[list[Segment]]) -> float:
    """Pairs of the busiest rank over the mean."""
    work = [causal_pairs(own) for own in split]
    return max(work) * len(work) / sum(work)


def figure(length: int, ranks: int) -> go.Figure:
    """Both splits of one prompt: pieces by rank, with the share of causal work."""
    fig = go.Figure()
    ways = {"early and late piece": split_tokens([length], ranks), "in order": in_order(length, ranks)}
    for name, split in ways.items():
        total = sum(causal_pairs(own) for own in split)
        for rank, own in enumerate(split):
            for segment in own:
                size = segment.stop - segment.start
                fig.add_bar(x=[size], base=[segment.start], y=[name], orientation="h", showlegend=False,
                            marker_color=style.PALETTE[rank % len(style.PALETTE)], text=f"rank {rank}",
                            insidetextanchor="middle", textposition="inside", textfont={"color": "white"}, textangle=0,
                            hovertemplate=f"rank {rank}: tokens {segment.start}–{segment.stop - 1}, "
                                          f"{causal_pairs(own) / total:.1%} of the work<extra></extra>")
    fig.update_xaxes(title_text="token of the prompt", showgrid=False)
    busiest = {name: imbalance(split) for name, split in ways.items()}
    return style.finish(
        fig, f"In order the last rank has {busiest['in order']:.2f} times the mean of the pairs, in two pieces "
        f"{busiest['early and late piece']:.3f}", "modelled",
        f"{length:,} tokens over {ranks} ranks; pairs of a full causal layer", barmode="overlay", height=260)


def bytes_table(config: ModelConfig, world: int, length: int) -> Table:
    """Bytes that a rank receives in a prefill of one prompt: heads cut against tokens cut."""
    lines = []
    for plan in (Plan(world, 1, world), Plan(world, 1, world, True)):
        found = exchanges(config, plan)
        halo = sum(e.times * e.sequence_bytes for e in found)
        for name in dict.fromkeys(e.name for e in found):
            size = sum(e.step_bytes for e in found if e.name == name) * length
            lines.append([str(plan), name, f"{size / 1e6:,.1f}", "modelled"])
        total = sum(e.step_bytes for e in found) * length + halo
        lines.append([str(plan), "all, halo included", f"{total / 1e6:,.1f}", "modelled"])
    return table(lines, ["plan", "exchange", "MB received by a rank", "origin"])
