"""What the order of softmax and selection changes: the softmax over the chosen four, or over all and then chosen.

The proportions of the four weights are the same either way. What differs is their sum: 1, or the share that the four
have of all experts. The layer's output is multiplied by that sum, the residual stream is not.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_kernels.reference.moe import route
from gptoss_lab.viz import style


def kept_share(logits: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """[T]: sum of the weights when the softmax comes before the selection. logits: [T, E]. (After it: always 1.)"""
    return route(logits, experts_per_token, softmax="before")[1].sum(dim=-1)


def figure(logits: Sequence[float], experts_per_token: int) -> go.Figure:
    """The weights of one token's experts in both orders."""
    row = torch.tensor([list(logits)], dtype=torch.float64)
    ids, after = route(row, experts_per_token, torch.float64)
    before = route(row, experts_per_token, torch.float64, softmax="before")[1]
    names = [f"expert {e}<br>logit {logits[e]:g}" for e in ids[0].tolist()] + ["sum"]
    fig = go.Figure()
    for name, weights, colour in (("softmax after the selection (gpt-oss)", after, style.BLUE),
                                  ("softmax before it", before, style.GREY)):
        values = [*weights[0].tolist(), weights.sum().item()]
        fig.add_bar(x=names, y=values, name=name, marker_color=colour, text=[f"{v:.4f}" for v in values],
                    textposition="outside")
    fig.update_xaxes(title_text="chosen expert")
    fig.update_yaxes(title_text="weight", range=[0, 1.12])
    return style.finish(
        fig, f"Softmax before the selection gives away {100 * (1 - before.sum().item()):.1f} % of the layer's output",
        "live", f"logits {', '.join(f'{z:g}' for z in logits)}; the proportions are the same", barmode="group")
