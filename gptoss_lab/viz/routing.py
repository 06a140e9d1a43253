"""Which experts a prompt visits: the router's choices of every layer, as counts and as one token's path."""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_lab.viz import style


def expert_counts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many tokens chose each expert. ids: [L, T, k] expert ids. Returns [L, E] int64; each row sums to T * k.

    ValueError for an id outside 0..E-1.
    """
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < 0 or high >= num_experts:
        raise ValueError(f"expert ids run from {low} to {high}; 0..{num_experts - 1} are expected")
    flat = ids.reshape(ids.shape[0], -1).long()
    return torch.zeros(ids.shape[0], num_experts, dtype=torch.int64).scatter_add_(1, flat, torch.ones_like(flat))


def experts_touched(ids: torch.Tensor) -> torch.Tensor:
    """How many different experts each layer needs for these tokens. ids: [L, T, k]. Returns [L] int64."""
    return torch.tensor([layer.unique().numel() for layer in ids])


def expected_touched(tokens: int, num_experts: int, experts_per_token: int) -> float:
    """Experts a layer needs on average if every token chose at random: E (1 - (1 - k/E)^T)."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


def counts_figure(ids: torch.Tensor, num_experts: int, origin: str, what: str) -> go.Figure:
    """Tokens per expert and layer. ids: [L, T, k]."""
    layers, tokens, k = ids.shape
    counts = expert_counts(ids, num_experts)
    fig = go.Figure(go.Heatmap(
        z=counts.tolist(), x=list(range(num_experts)), y=list(range(layers)), xgap=1, ygap=1, zmin=0,
        colorscale=style.SEQUENTIAL, colorbar={"title": {"text": "tokens"}},
        text=counts.tolist() if num_experts <= 32 else None, texttemplate="%{text}" if num_experts <= 32 else None,
        hovertemplate="layer %{y}, expert %{x}: %{z} tokens<extra></extra>",
    ))
    fig.update_xaxes(title_text="expert", dtick=1 if num_experts <= 32 else 16, showgrid=False)
    fig.update_yaxes(title_text="layer", autorange="reversed", dtick=1, showgrid=False)
    return style.finish(
        fig, f"{tokens} tokens choose {k} of {num_experts} experts in each layer; "
             f"an even spread would give {tokens * k / num_experts:.1f} each",
        origin, what, height=220 + 26 * layers,
    )


def path_figure(
    ids: torch.Tensor, weights: torch.Tensor, labels: Sequence[str], layer: int, num_experts: int, origin: str,
    what: str,
) -> go.Figure:
    """One layer: the weight that each token gives to each expert. ids, weights: [L, T, k]. labels: the T tokens."""
    dense = torch.zeros(ids.shape[1], num_experts).scatter_(1, ids[layer].long(), weights[layer].float())
    rows = [f"{i} · {label.replace(' ', '␣')}" for i, label in enumerate(labels)]
    fig = go.Figure(go.Heatmap(
        z=dense.tolist(), x=list(range(num_experts)), y=rows,
        xgap=1, ygap=1, zmin=0, zmax=1, colorscale=style.SEQUENTIAL,
        colorbar={"title": {"text": "weight"}},
        hovertemplate="token %{y}, expert %{x}: %{z:.3f}<extra></extra>",
    ))
    fig.update_xaxes(title_text="expert", dtick=1 if num_experts <= 32 else 16, showgrid=False)
    fig.update_yaxes(title_text="token", autorange="reversed", type="category", showgrid=False, dtick=1)
    return style.finish(
        fig, f"Layer {layer}: each token's row has {ids.shape[2]} weights that sum to 1", origin, what,
        height=200 + 20 * len(labels),
    )
