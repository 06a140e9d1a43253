"""The sink in one row of attention, by hand: two readings of the formula, and the online softmax step by step.

What: the example of the notebooks is one query with four keys, logits 1 to 4, values 10 to 40 and a sink of 2; small
enough to redo on paper, and every wrong place for the sink gives another number.

How: `gptoss_kernels.attention.steps` holds the arithmetic (one row, fp64); here it becomes a table and figures.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from gptoss_kernels.attention import steps
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

LOGITS, VALUES, SINK = (1.0, 2.0, 3.0, 4.0), (10.0, 20.0, 30.0, 40.0), 2.0
"""The example row: logits (already scaled), one value per key, the sink in the same units as the logits."""


def printed_formula(logits: Sequence[float], values: Sequence[float], sink: float) -> float:
    """softmax(logits + sink) @ values, the sink added to every logit, as the post's formula reads literally. fp64."""
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64) + sink, dim=0)
    return float(weights @ torch.tensor(values, dtype=torch.float64))


def one_more_logit(logits: Sequence[float], values: Sequence[float], sink: float) -> float:
    """softmax([logits, sink]) @ [values, 0]: the sink as a key of its own whose value is zero. fp64."""
    weights = torch.softmax(torch.tensor([*logits, sink], dtype=torch.float64), dim=0)
    return float(weights @ torch.tensor([*values, 0.0], dtype=torch.float64))


def gate(lse: float, sink: float) -> float:
    """sigmoid(lse - sink): what is left of a head's output once the sink took its share. lse: of the keys alone."""
    return 1.0 if sink == -math.inf else 1.0 / (1.0 + math.exp(sink - lse))


def readings_figure(logits: Sequence[float], values: Sequence[float], sink: float) -> go.Figure:
    """The output against the sink, for both readings of the formula; `sink` is marked on both."""
    x = [n / 4 for n in range(-24, 41)]
    fig = go.Figure()
    for function, name, colour, beside in (
        (printed_formula, "added to every logit, as printed", style.RED, "top right"),
        (one_more_logit, "one more logit, with a value of zero", style.BLUE, "bottom left"),
    ):
        fig.add_scatter(x=x, y=[function(logits, values, s) for s in x], name=name, mode="lines",
                        line={"color": colour})
        at = function(logits, values, sink)
        fig.add_scatter(x=[sink], y=[at], mode="markers+text", marker={"color": colour, "size": 9}, showlegend=False,
                        text=[f"{at:.6f}"], textposition=beside, textfont={"color": colour})
    fig.update_xaxes(title_text="sink s of the head", dtick=2)
    fig.update_yaxes(title_text="output of the head", rangemode="tozero", range=[0, 1.15 * max(values)])
    return style.finish(
        fig, "Added to every logit, a sink does nothing; as one more logit it turns the head down", "live",
        f"logits {_list(logits)}; values {_list(values)}; fp64",
    )


def steps_table(logits: Sequence[float], values: Sequence[float], sink: float, block: int) -> Table:
    """The state (m, den, acc) after the virtual key and after each block of keys, and the factor of the old sums."""
    states = steps.online_softmax(logits, values, sink, block)
    first = "the sink" if sink != -math.inf else "nothing"
    rows = [[first, "", *_state(states[0])]]
    for n, (before, now) in enumerate(pairwise(states)):
        seen = logits[n * block : (n + 1) * block]
        keep = math.exp(before.m - now.m) if before.m != -math.inf else 0.0
        rows.append([f"logits {_list(seen)}", f"{keep:.6f}", *_state(now)])
    return table(rows, ["after", "old sums times", "m", "den", "acc", "acc / den"])


def example_row(keys: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Gaussian logits (spread 1.5) and values around 1 for a row of `keys` keys."""
    g = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(keys, generator=g, dtype=torch.float64)
    return logits.tolist(), (1 + torch.randn(keys, generator=g, dtype=torch.float64)).tolist()


def steps_figure(logits: Sequence[float], values: Sequence[float], sink: float, block: int) -> go.Figure:
    """A walk over the keys: the running maximum above the logits, and the output so far against the exact one."""
    states = steps.online_softmax(logits, values, sink, block)
    at = [min(n * block, len(logits)) for n in range(len(states))]
    exact = one_more_logit(logits, values, sink)
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    fig.add_scatter(x=list(range(1, len(logits) + 1)), y=list(logits), mode="markers", name="logit of a key",
                    marker={"color": style.GREY}, row=1, col=1)
    fig.add_scatter(x=at, y=[s.m for s in states], name="running maximum m", line={"shape": "hv", "color": style.BLUE},
                    row=1, col=1)
    fig.add_scatter(x=[0], y=[sink], mode="markers", name="the sink, seen first", row=1, col=1,
                    marker={"color": style.RED, "size": 11, "symbol": "square"})
    fig.add_scatter(x=[0, len(logits)], y=[exact, exact], name=f"exact output {exact:.6f}", mode="lines",
                    line={"color": style.GREEN, "dash": "dot"}, row=2, col=1)
    fig.add_scatter(x=at, y=[s.out for s in states], name="acc / den so far", mode="lines+markers",
                    line={"color": style.PURPLE}, row=2, col=1)
    fig.update_xaxes(title_text="keys seen", row=2, col=1)
    fig.update_yaxes(title_text="logit", row=1, col=1)
    fig.update_yaxes(title_text="output", row=2, col=1)
    return style.finish(
        fig, f"{len(states) - 1} steps of {block} end within {abs(states[-1].out - exact):.0e} of the exact output",
        "live", f"{len(logits)} random keys; sink {sink:g}; fp64", height=520, legend={"y": -0.16},
    )


def _state(state: steps.State) -> list[str]:
    return [f"{state.m:g}", f"{state.den:.6f}", f"{state.acc:.6f}", f"{state.out:.6f}"]


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)
