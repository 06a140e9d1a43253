"""A roofline of every launch of a step, and the table behind it.

How to read one. To the right: FLOP per byte, which the kernel's formula fixes. Up: FLOP/s. Below the slanted roof a
kernel waits for memory, below a flat one for the unit it computes with; where they meet lies the ridge. A hollow mark
on the roof is the most that this kernel can reach (modelled); a filled mark is what was recorded, and the line between
them is what is left.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import plotly.graph_objects as go

from gptoss_lab.cost.hardware import H200
from gptoss_lab.viz import style
from gptoss_lab.viz.profile_kernels import FP32_FLOPS, Launch
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
ROOFS = {"fp8": H200.fp8_flop_per_second, "bf16": H200.bf16_flop_per_second, "fp32": FP32_FLOPS}
RIGHT = 4.4                     # power of ten at which the FLOPs per byte end: room for the roofs' names
_SYMBOLS = {"fp8": "circle", "bf16": "square", "fp32": "diamond"}


@dataclass(frozen=True)
class Point:
    """A launch on the roofline. intensity: FLOP per byte. roof: most FLOP/s there. reached: FLOP/s recorded or None."""

    launch: Launch
    intensity: float
    roof: float
    reached: float | None


def ridge(unit: str) -> float:
    """FLOP per byte from which arithmetic is the limit, for "fp8", "bf16" or "fp32"."""
    return ROOFS[unit] / H200.memory_bytes_per_second


def roof(intensity: float, unit: str) -> float:
    """Most FLOP/s at this intensity."""
    return min(ROOFS[unit], intensity * H200.memory_bytes_per_second)


def points(launches: Iterable[Launch], rows: Iterable[Row]) -> list[Point]:
    """The launches that compute anything; pure copies have no place on a roofline."""
    rows, found = list(rows), []
    for launch in launches:
        if launch.flop > 0:
            row = launch.measured(rows)
            found.append(Point(launch, launch.intensity, roof(launch.intensity, launch.unit),
                               row and launch.flop / (1e-6 * row["value"])))
    return found


def arithmetic_share(launches: Iterable[Launch]) -> float:
    """Share of a step's least time that is spent in launches limited by arithmetic."""
    times = [(one.times * one.bound_us, one.limited_by) for one in launches]
    return sum(t for t, limit in times if limit == "arithmetic") / sum(t for t, _ in times)


def figure(steps: Mapping[str, Sequence[Launch]], rows: Iterable[Row], names: bool = True) -> go.Figure:
    """Roofline of one or more steps, each in its colour. names: write each launch's name beside its mark."""
    rows, fig, count, reached = list(rows), go.Figure(), 0, []
    for unit, top in ROOFS.items():
        xs = [0.1, ridge(unit), 10**RIGHT]
        fig.add_scatter(x=xs, y=[roof(x, unit) / 1e12 for x in xs], mode="lines", showlegend=False,
                        line={"color": style.MUTED, "width": 1.2}, hoverinfo="skip")
        fig.add_annotation(x=RIGHT, y=log10(top / 1e12), text=f"{unit}, {top / 1e12:,.0f}", showarrow=False,
                           xanchor="right", yshift=9, font={"size": 11, "color": style.MUTED})
    for (name, launches), colour in zip(steps.items(), style.PALETTE, strict=False):
        found = points(launches, rows)
        count, reached = count + len(found), [*reached, *(p.reached for p in found if p.reached is not None)]
        _marks(fig, name, found, colour)
        if names:
            _names(fig, found)
    fig.update_xaxes(type="log", title_text="FLOP per byte", range=[-1, RIGHT], dtick=1)
    fig.update_yaxes(type="log", title_text="TFLOP/s", dtick=1,
                     range=[min([-1.0, *(log10(speed / 1e12) - 0.2 for speed in reached)]), 4.3])
    shares = ", ".join(f"{name} {arithmetic_share(launches):.0%}" for name, launches in steps.items())
    return style.finish(fig, f"Share of the least time that arithmetic limits: {shares}", "modelled",
                        f"hollow: the datasheet's bound; filled: recorded on an H200 ({len(reached)} of {count}); "
                        "circles e4m3, squares bf16, diamonds fp32", height=560, legend={"y": -0.14})


def roofline_table(launches: Iterable[Launch], rows: Iterable[Row]) -> Table:
    """Launches with grid, block, FLOPs, bytes, intensity, bound and what was recorded."""
    rows, lines = list(rows), []
    for launch in launches:
        row = launch.measured(rows)
        lines.append([
            launch.what, launch.times, " x ".join(map(str, launch.grid)) or "torch's", launch.threads or "",
            launch.unit if launch.flop else "none", f"{launch.flop / 1e9:,.3g}", f"{launch.bytes / 1e6:,.3g}",
            f"{launch.intensity:,.3g}", launch.limited_by, f"{launch.bound_us:,.2f}",
            "not recorded yet" if row is None else f"{row['value']:,.1f}"])
    return table(lines, ["launch", "times", "grid", "block", "unit", "GFLOP", "MB", "FLOP per byte", "limited by",
                         "bound, us (modelled)", "recorded, us"])


def _marks(fig: go.Figure, name: str, found: Sequence[Point], colour: str) -> None:
    """Hollow marks on the roof, filled ones below with a line between the two."""
    fig.add_scatter(
        x=[p.intensity for p in found], y=[p.roof / 1e12 for p in found], mode="markers", name=f"{name}, bound",
        text=[p.launch.what for p in found],
        marker={"symbol": [f"{_SYMBOLS[p.launch.unit]}-open" for p in found], "size": 9, "color": colour,
                "line": {"width": 1.6}},
        hovertemplate="%{text}: %{x:.3g} FLOP per byte, at most %{y:.3g} TFLOP/s<extra></extra>")
    known = [p for p in found if p.reached is not None]
    for p in known:
        fig.add_scatter(x=[p.intensity] * 2, y=[p.roof / 1e12, p.reached / 1e12], mode="lines", showlegend=False,
                        line={"color": colour, "dash": "dot", "width": 1}, hoverinfo="skip")
    if known:
        fig.add_scatter(
            x=[p.intensity for p in known], y=[p.reached / 1e12 for p in known], mode="markers",
            name=f"{name}, recorded", text=[p.launch.what for p in known],
            marker={"symbol": [_SYMBOLS[p.launch.unit] for p in known], "size": 10, "color": colour},
            hovertemplate="%{text}: %{y:.3g} TFLOP/s recorded<extra></extra>")


def _names(fig: go.Figure, found: Sequence[Point]) -> None:
    """Names in columns, in the order of their marks, with a leader to each: waiting for memory to the right below (in
    a second column, further right, what lies right of the first), limited by arithmetic to the left above."""
    slanted = _together([p for p in found if p.launch.limited_by == "bytes"])
    flat = _together([p for p in found if p.launch.limited_by != "bytes"])
    left = [one for one in slanted if log10(one[0].intensity) < 1.4]
    lines = sum(name.count("<br>") + 1 for _, name in left)
    columns = ((left, 1.45, -0.75, 2.0 / max(1, lines - 1), "left"), (slanted[len(left):], 3.05, 0.95, 0.27, "left"),
               (flat, 1.6, 3.15, 0.28, "right"))
    for found, x, y, step, anchor in columns:
        for mark, name in found:
            more = name.count("<br>")                                   # a label stands at the middle of its lines
            _leader(fig, mark, name, x, y + step * more / 2, anchor)
            y += step * (more + 1)


def _together(found: Sequence[Point], nearer: float = 1.06) -> list[tuple[Point, str]]:
    """Marks by intensity with their names; those that would cover each other get one name together."""
    groups: list[list[Point]] = []
    for p in sorted(found, key=lambda p: p.intensity):
        if groups and p.intensity < nearer * groups[-1][0].intensity:
            groups[-1].append(p)
        else:
            groups.append([p])
    return [(group[0], _in_lines(p.launch.what.split(", ")[0] if ", residual" in p.launch.what else p.launch.what
                                 for p in group)) for group in groups]


def _in_lines(names: Iterable[str], longest: int = 40) -> str:
    """Names one after the other, in lines of so many letters at most where a name itself is not longer."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + 3 + len(name) > longest:
            lines.append("")
        lines[-1] += (" · " if lines[-1] else "") + name
    return "<br>".join(lines)


def _leader(fig: go.Figure, p: Point, name: str, x: float, y: float, anchor: str) -> None:
    """A name at 10^x, 10^y, and a line from there to the mark."""
    fig.add_annotation(x=log10(p.intensity), y=log10(p.roof / 1e12), ax=x, ay=y, axref="x", ayref="y", text=name,
                       xanchor=anchor, font={"size": 11, "color": style.INK}, arrowcolor=style.GREY, arrowwidth=0.7,
                       arrowhead=0, standoff=5)
