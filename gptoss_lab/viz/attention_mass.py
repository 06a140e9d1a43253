"""How much attention a sink takes, as the keys grow in number: a closed form, and a model's own figures.

With n keys whose logits are equal (to 0), a sink of s takes e^s / (n + e^s). In a full layer n grows with the
sequence; in a sliding layer it stops at the window. So the same number s means different things to the two kinds.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_lab.viz import style


def share(keys: int, sink: float) -> float:
    """e^s / (n + e^s): the sink's share beside n keys of logit 0. With no keys at all it is 1 (0 for no sink)."""
    if sink == -math.inf:
        return 0.0
    return 1.0 / (1.0 + keys * math.exp(-sink))


def share_figure(sinks: Sequence[float], window: int, longest: int) -> go.Figure:
    """The share against the position of the query, for each sink, in a full layer and in a sliding one."""
    tokens = sorted({round(2 ** (n / 4)) for n in range(int(4 * math.log2(longest)) + 1)} | {window, longest})
    fig = go.Figure()
    for sink, colour in zip(sinks, style.PALETTE, strict=False):
        fig.add_scatter(x=tokens, y=[100 * share(t, sink) for t in tokens], mode="lines", line={"color": colour},
                        name=f"sink {sink:g}, full")
        fig.add_scatter(x=tokens, y=[100 * share(min(t, window), sink) for t in tokens], mode="lines",
                        line={"color": colour, "dash": "dot"}, name=f"sink {sink:g}, window {window}")
    fig.update_xaxes(title_text="tokens so far", type="log", dtick=1, tickformat=",")
    fig.update_yaxes(title_text="share of the sink, %", type="log", dtick=1, exponentformat="none")
    kept, left = (100 * share(n, sinks[-1]) for n in (window, longest))
    return style.finish(
        fig, f"Among {longest:,} equal keys a sink of {sinks[-1]:g} keeps {left:.2g} %, in the window {kept:.0f} %",
        "modelled", "equal logits of 0 for all keys: e^s / (n + e^s)",
    )


def position_figure(
    mass: torch.Tensor, sliding: Sequence[bool], window: int, origin: str, what: str
) -> go.Figure:
    """A model's sink share by position, averaged over the heads and layers of a kind. mass: [L, T, H] in 0..1."""
    fig = go.Figure()
    kinds = torch.tensor(list(sliding))
    means = {}
    for name, chosen, colour in (("full layers", ~kinds, style.BLUE), ("sliding layers", kinds, style.OCHRE)):
        if not bool(chosen.any()):
            continue
        means[name] = 100 * mass[chosen].double().mean(dim=(0, 2))
        fig.add_scatter(x=list(range(1, mass.shape[1] + 1)), y=[round(y, 4) for y in means[name].tolist()], name=name,
                        mode="lines", line={"color": colour})
    if mass.shape[1] > window:
        fig.add_vline(x=window, line={"color": style.MUTED, "dash": "dot", "width": 1})
        fig.add_annotation(x=math.log10(window), y=1, yref="paper", text=f" token {window}", xanchor="left",
                           showarrow=False, font={"color": style.MUTED})
    fig.update_xaxes(title_text="tokens so far", type="log", dtick=1)
    fig.update_yaxes(title_text="share of the sink, %", type="log", tickvals=[1, 2, 5, 10, 20, 50, 100])
    ends = ", ".join(f"{y[-1]:.1f} % in {name}" for name, y in means.items())
    return style.finish(fig, f"At token {mass.shape[1]} the sinks hold {ends}", origin, what)
