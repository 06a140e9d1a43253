"""The sink under split-KV: three places that count it once, and the one that counts it per split.

To keep a GPU busy with one query, its keys are cut into splits that are walked apart and merged. A state that started
at the sink has the sink in its denominator; merging k such states has it there k times:

    sum e^z v / (sum e^z + k e^s),

whatever the cuts are, and whether or not a split has any keys. This is the closed form of the mistake.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go

from gptoss_kernels.attention import steps
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

NAMES = {
    "first split": "the first split starts at it",
    "virtual split": "a split of its own",
    "merge": "added in the merge",
    "every split": "every split starts at it",
}


def cuts(keys: int, splits: int, first: int) -> list[int]:
    """splits - 1 rising cuts of 0..keys: the first at `first`, the rest spread evenly over what remains.

    More splits than keys give empty ones. ValueError for a first cut outside 0..keys or fewer than one split.
    """
    if splits < 1 or not 0 <= first <= keys:
        raise ValueError(f"{splits} splits with the first cut at {first}: at least 1 split and a cut of 0..{keys} "
                         "are needed")
    rest = keys - first
    return [first + round(n * rest / (splits - 1)) for n in range(splits - 1)]


def counted(logits: Sequence[float], values: Sequence[float], sink: float, times: int) -> float:
    """The closed form with the sink counted `times` times: 0 for no sink, 1 for the right answer. fp64."""
    top = max([*logits, sink])
    weights = [math.exp(z - top) for z in logits]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / (sum(weights) + times * math.exp(sink - top))


def places_figure(
    logits: Sequence[float], values: Sequence[float], sink: float, splits: int, first: int
) -> go.Figure:
    """What each split walks over, for each place of the sink, and the output that the merge gives."""
    edges = [0, *cuts(len(logits), splits, first), len(logits)]
    right = counted(logits, values, sink, 1)
    fig, errors = go.Figure(), []
    for row, place in enumerate(steps.PLACES):
        boxes = _boxes(logits, edges, place)
        fig.add_scatter(
            x=[x for x, _, _ in boxes], y=[row] * len(boxes), mode="markers+text", text=[t for _, t, _ in boxes],
            textfont={"color": "white", "size": 12}, hoverinfo="skip", showlegend=False,
            marker={"symbol": "square", "size": 27, "color": [c for _, _, c in boxes]},
        )
        out = steps.split_attention(logits, values, sink, edges[1:-1], place)
        errors.append(abs(out - right))
        wrong = errors[-1] > 1e-9
        fig.add_annotation(x=1.0, xref="paper", y=row, xanchor="right", showarrow=False,
                           text=f"<b>{out:.6f}</b>", font={"size": 15, "color": style.RED if wrong else style.GREEN})
    last = _boxes(logits, edges, "merge")[-1][0]
    fig.update_yaxes(tickvals=list(range(len(NAMES))), ticktext=[NAMES[p] for p in steps.PLACES], autorange=False,
                     range=[len(NAMES) - 0.4, -0.6], showgrid=False, title_text="where the sink enters")
    fig.update_xaxes(showticklabels=False, ticks="", showgrid=False, range=[-0.8, last + 3.4],
                     title_text="s: the sink; a number: a key's logit; one colour: one split; M: the merge")
    words = f"{splits} split{'s' if splits > 1 else ''}"
    title = (f"With {words}, counting the sink per split is off by {errors[-1]:.6f}" if errors[-1] > 1e-9
             else "With 1 split every place is right, which is why short tests miss the mistake")
    where = ", ".join(map(str, edges[1:-1])) or "none"
    return style.finish(fig, title, "live", f"values {', '.join(f'{v:g}' for v in values)}; sink {sink:g}; "
                        f"cuts: {where}; fp64", height=330, margin={"l": 200})


def _boxes(logits: Sequence[float], edges: Sequence[int], place: str) -> list[tuple[float, str, str]]:
    """(x, text, colour) of the squares in a row of `places_figure`."""
    boxes: list[tuple[float, str, str]] = []
    x = 0.0
    for n, (a, b) in enumerate(pairwise(edges)):
        sunk = place == "every split" or (place == "first split" and n == 0)
        texts = ([("s", style.RED)] if sunk else []) + [
            (f"{z:g}", (style.BLUE, style.TEAL, style.PURPLE, style.OCHRE)[n % 4]) for z in logits[a:b]]
        for text, colour in texts or [("∅", style.GREY)]:
            boxes.append((x, text, colour))
            x += 1.0
        x += 0.5
    if place == "virtual split":
        boxes.append((x, "s", style.RED))
    boxes.append((len(logits) + len(edges) * 1.5, "M", style.INK))
    if place == "merge":
        boxes.append((boxes[-1][0] + 1.0, "s", style.RED))
    return boxes


def error_figure(logits: Sequence[float], values: Sequence[float], sink: float, most: int = 16) -> go.Figure:
    """The output against the number of splits: counted once, per split, and not at all."""
    numbers = list(range(1, most + 1))
    walked = [steps.split_attention(logits, values, sink, cuts(len(logits), n, 0), "every split") for n in numbers]
    fig = go.Figure()
    for times, name, colour in ((0, "no sink", style.GREY), (1, "counted once", style.GREEN)):
        out = counted(logits, values, sink, times)
        fig.add_scatter(x=numbers, y=[out] * most, name=f"{name}: {out:.6f}", mode="lines", line={"color": colour})
    fig.add_scatter(x=numbers, y=[counted(logits, values, sink, n) for n in numbers], mode="lines",
                    name="closed form of the mistake", line={"color": style.RED, "dash": "dot"})
    fig.add_scatter(x=numbers, y=walked, mode="markers", name="counted in every split", marker={"color": style.RED})
    fig.update_xaxes(title_text="splits, empty ones included", dtick=1)
    fig.update_yaxes(title_text="output of the head", rangemode="tozero")
    lost = 100 * (1 - walked[-1] / counted(logits, values, sink, 1))
    return style.finish(
        fig, f"Counted per split, {most} splits lose {lost:.0f} % of the output", "live",
        f"{len(logits)} keys; sink {sink:g}; the cuts do not matter, only their number; fp64",
    )


def merge_table(logits: Sequence[float], values: Sequence[float], sink: float, at: Sequence[int]) -> Table:
    """A decode's merge: what each split left behind, its factor e^(m - M), and the sums. The first split has the sink.

    at: rising cuts, as in `steps.split_attention`.
    """
    edges = [0, *at, len(logits)]
    parts = [steps.block_state(logits[a:b], values[a:b]) for a, b in pairwise(edges)]
    parts[0] = steps.merge(steps.sink_state(sink), parts[0])
    top = max(part.m for part in parts)
    factors = [math.exp(part.m - top) if part.m != -math.inf else 0.0 for part in parts]
    rows = []
    for n, ((a, b), p, f) in enumerate(zip(pairwise(edges), parts, factors, strict=True)):
        numbers = (p.m, p.den, p.acc, f, f * p.den, f * p.acc)
        rows.append([f"{n}", f"{a}..{b - 1}" if b > a else "none", *(f"{x:.6f}" for x in numbers)])
    den = sum(f * p.den for f, p in zip(factors, parts, strict=True))
    acc = sum(f * p.acc for f, p in zip(factors, parts, strict=True))
    rows.append(["sum", "", "", "", "", "", f"{den:.6f}", f"{acc:.6f}"])
    rows.append(["output", "", "", "", "", "", "", f"{acc / den if den else 0.0:.6f}"])
    return table(rows, ["split", "keys", "m", "den", "acc", "e^(m - M)", "its den", "its acc"])
