"""What a sink takes from the softmax.

A sink is an extra logit per head with no value behind it. Its share of the softmax is attention that goes nowhere:
the head may look at nothing. A forward pass reports it as "sink_mass" (gptoss_lab.model.observe): exp(sink - LSE), with
LSE the logarithm of the full denominator, which the attention operation returns anyway.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_lab.viz import style


def softmax_with_sink(logits: torch.Tensor, sink: float) -> tuple[torch.Tensor, float]:
    """Weights of the keys and the share of the sink; together they are 1. logits: [K]. sink: -inf for none."""
    full = torch.softmax(torch.cat([logits.double(), torch.tensor([sink], dtype=torch.float64)]), dim=0)
    return full[:-1], float(full[-1])


def softmax_figure(logits: Sequence[float], sink: float) -> go.Figure:
    """The weights of a few keys without and with a sink, and the share the sink takes."""
    keys = torch.tensor(list(logits), dtype=torch.float64)
    plain, _ = softmax_with_sink(keys, -torch.inf)
    weights, share = softmax_with_sink(keys, sink)
    names = [f"key {i}<br>{z:g}" for i, z in enumerate(logits)] + [f"sink<br>{sink:g}"]
    fig = go.Figure()
    fig.add_bar(x=names, y=[*plain.tolist(), 0.0], name="without a sink", marker_color=style.GREY)
    fig.add_bar(x=names, y=[*weights.tolist(), share], name="with the sink", marker_color=style.BLUE,
                text=[f"{w:.3f}" for w in [*weights.tolist(), share]], textposition="outside")
    fig.update_xaxes(title_text="what is attended to, and its logit")
    fig.update_yaxes(title_text="softmax weight", range=[0, 1.05])
    return style.finish(
        fig, f"A sink of {sink:g} takes {100 * share:.1f} % of this head's attention", "live",
        f"logits {', '.join(f'{z:g}' for z in logits)}; the keys keep their proportions", barmode="group",
    )


def mass_figure(mass: torch.Tensor, sliding: Sequence[bool], origin: str, what: str) -> go.Figure:
    """Share of the sink per layer and head. mass: [L, H] in 0..1. sliding: whether layer l sees only its window."""
    names = [f"{i} {'window' if s else 'full'}" for i, s in enumerate(sliding)]
    fig = go.Figure(go.Heatmap(
        z=(100 * mass).tolist(), x=list(range(mass.shape[1])), y=names, xgap=1, ygap=1, zmin=0,
        colorscale=style.SEQUENTIAL, colorbar={"title": {"text": "sink, %"}},
        hovertemplate="layer %{y}, head %{x}: %{z:.1f} %<extra></extra>",
    ))
    fig.update_xaxes(title_text="query head", showgrid=False, dtick=1 if mass.shape[1] <= 16 else 8)
    fig.update_yaxes(title_text="layer and what it sees", autorange="reversed", type="category", showgrid=False)
    mean = 100 * float(mass.mean())
    return style.finish(
        fig, f"On average a head gives {mean:.1f} % of its attention to its sink", origin, what,
        height=220 + 24 * len(names),
    )
