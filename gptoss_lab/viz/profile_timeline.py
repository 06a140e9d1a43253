"""What ran when: the launches of a trace on a line per kind, and the gaps in which nothing ran.

The trace is torch.profiler's, read by `gptoss_lab.bench.trace`. On the CPU the outermost operators stand in for
kernels; a gap is then time that Python took between two of them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.bench.trace import Kernel, by_kind, idle, span
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

GAP = "nothing runs"


@dataclass(frozen=True)
class Stretch:
    """Something that took from `start` to `end`, microseconds after the first launch. kind: or GAP."""

    kind: str
    name: str
    start: float
    end: float


def stretches(kernels: Sequence[Kernel]) -> list[Stretch]:
    """Every launch, and every gap between them, by start. kernels: by start."""
    found: list[Stretch] = []
    zero = kernels[0].start if kernels else 0.0
    end = 0.0
    for kernel in kernels:
        start = kernel.start - zero
        if start > end:
            found.append(Stretch(GAP, GAP, end, start))
        found.append(Stretch(kernel.kind, kernel.name, start, start + kernel.microseconds))
        end = max(end, start + kernel.microseconds)
    return found


def between(found: Sequence[Stretch], begin: float, length: float) -> list[Stretch]:
    """The stretches that reach into [begin, begin + length), cut off at its ends."""
    if length <= 0:
        raise ValueError(f"length is {length}; a positive number of microseconds is needed")
    until = begin + length
    return [Stretch(s.kind, s.name, max(s.start, begin), min(s.end, until))
            for s in found if s.end > begin and s.start < until]


def figure(
    kernels: Sequence[Kernel], origin: str, what: str, begin: float = 0.0, length: float | None = None
) -> go.Figure:
    """A line per kind with its launches as bars; the lowest line holds the gaps. ValueError for an empty trace."""
    if not kernels:
        raise ValueError("figure: the trace holds no launch; at least one is needed")
    whole = span(kernels)
    shown = between(stretches(kernels), begin, whole - begin if length is None else length)
    order = [row["kind"] for row in by_kind(kernels)] + [GAP]
    colours = dict(zip(order[:-1], style.PALETTE * 2, strict=False)) | {GAP: style.INK}
    fig = go.Figure()
    for kind in order:
        mine = [s for s in shown if s.kind == kind]
        fig.add_bar(y=[kind] * len(mine), base=[round(s.start, 2) for s in mine],
                    x=[round(s.end - s.start, 2) for s in mine], orientation="h", showlegend=False,
                    marker={"color": colours[kind], "line": {"width": 0}}, customdata=[s.name[:40] for s in mine],
                    hovertemplate="%{customdata}: %{x:.1f} us from %{base:.1f} us<extra></extra>")
    fig.update_layout(barmode="overlay", bargap=0.35)
    fig.update_xaxes(title_text="microseconds after the first launch")
    fig.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    share = sum(idle(kernels)) / whole if whole else 0.0
    return style.finish(fig, f"{len(kernels)} launches in {whole / 1e3:,.1f} ms; in {share:.1%} of it nothing runs",
                        origin, what, height=170 + 34 * len(order))


def kinds_table(kernels: Sequence[Kernel], origin: str) -> Table:
    """Where the time goes: kind, launches, time, share, the longest launches with grid and block; gaps last."""
    lines = []
    for row in by_kind(kernels):
        first = row["shapes"][0]
        lines.append([row["kind"], row["launches"], f"{row['microseconds']:,.0f}", f"{100 * row['share']:.1f}",
                      first["name"], _layout(first["grid"]), _layout(first["block"]), origin])
    gaps = idle(kernels)
    lines.append([GAP, len(gaps), f"{sum(gaps):,.0f}", "", f"longest {max(gaps, default=0.0):,.0f} us", "", "", origin])
    return table(lines, ["kind", "launches", "us", "share, %", "most of it", "grid", "block", "origin"])


def names_table(kernels: Sequence[Kernel], origin: str, most: int = 12) -> Table:
    """The launches that take longest, by name, grid and block: launches, time, time of one, share."""
    whole = sum(k.microseconds for k in kernels) or 1.0
    shapes = sorted((shape for row in by_kind(kernels) for shape in row["shapes"]), key=lambda s: -s["microseconds"])
    return table([[s["name"][:48], _layout(s["grid"]), _layout(s["block"]), s["launches"], f"{s['microseconds']:,.0f}",
                   f"{s['microseconds'] / s['launches']:,.1f}", f"{100 * s['microseconds'] / whole:.1f}", origin]
                  for s in shapes[:most]],
                 ["launch", "grid", "block", "launches", "us", "us each", "share, %", "origin"])


def _layout(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
