"""Who sees whom: the causal mask of a full layer and of a sliding one.

A sliding layer's window counts the query itself: with a window of 128 a query sees itself and the 127 keys before it.
"""
from __future__ import annotations

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from gptoss_lab.viz import style


def visible(tokens: int, window: int | None) -> torch.Tensor:
    """[tokens (queries), tokens (keys)] bool: key j is seen by query i if j <= i and, with a window, j > i - window."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def figure(tokens: int, window: int) -> go.Figure:
    """Both masks side by side for a short sequence."""
    fig = make_subplots(rows=1, cols=2, subplot_titles=["full layer", f"sliding layer, window {window}"],
                        horizontal_spacing=0.12)
    for column, width in ((1, None), (2, window)):
        seen = visible(tokens, width)
        fig.add_heatmap(z=seen.int().tolist(), colorscale=[[0, "#f3f7fb"], [1, style.BLUE]], showscale=False, xgap=1,
                        ygap=1, row=1, col=column, hovertemplate="query %{y}, key %{x}: %{z}<extra></extra>")
    fig.update_annotations(font_size=13)
    fig.update_xaxes(title_text="key position", showgrid=False)
    fig.update_yaxes(title_text="query position", autorange="reversed", showgrid=False)
    counts = [int(visible(tokens, w).sum()) for w in (None, window)]
    return style.finish(
        fig, f"Of {counts[0]} query-key pairs a window of {window} keeps {counts[1]}", "modelled",
        f"{tokens} tokens; blue: seen", height=440, width=820, margin={"t": 104},
    )
