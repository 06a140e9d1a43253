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

RUNNING = 16                    # tokens of a running mean

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
    """A model's sink share by position, averaged over the heads and layers of a kind, and over RUNNING tokens.

    mass: [L, T, H] in 0..1.
    """
    fig = go.Figure()
    kinds = torch.tensor(list(sliding))
    means = {}
    for name, chosen, colour in (("full layers", ~kinds, style.BLUE), ("sliding layers", kinds, style.OCHRE)):
        if not bool(chosen.any()):
            continue
        share = 100 * mass[chosen].double().mean(dim=(0, 2))
        means[name] = _running(share)
        places, opacity = list(range(1, mass.shape[1] + 1)), ((share, 0.25, 1), (means[name], 1.0, 2.5))
        for values, alpha, width in opacity:
            fig.add_scatter(x=places, y=[round(y, 4) for y in values.tolist()], name=name, mode="lines", opacity=alpha,
                            line={"color": colour, "width": width}, showlegend=alpha == 1.0)
    if mass.shape[1] > window:
        fig.add_vline(x=window, line={"color": style.MUTED, "dash": "dot", "width": 1})
        fig.add_annotation(x=window, y=1, yref="paper", text=f" token {window}", xanchor="left",
                           showarrow=False, font={"color": style.MUTED})
    fig.update_xaxes(title_text=f"tokens so far (broad lines: mean of {RUNNING})")
    fig.update_yaxes(title_text="share of the sink, %", range=[0, 100])
    last = min(RUNNING, mass.shape[1])
    ends = ", ".join(f"{y[-1]:.0f} % in {name}" for name, y in means.items())
    return style.finish(fig, f"Over the last {last} tokens the sinks hold {ends}", origin, what)


def _running(values: torch.Tensor) -> torch.Tensor:
    """values [T] -> the mean of each and the up to RUNNING - 1 before it."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    ends = torch.arange(1, len(values) + 1)
    begins = (ends - RUNNING).clamp(min=0)
    return (sums[ends] - sums[begins]) / (ends - begins)
