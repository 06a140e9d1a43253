"""The clamped SwiGLU of gpt-oss: what an expert does between its two matrices.

h = g sigmoid(1.702 g) (u + 1), with the gate g clamped from above only and u on both sides. So h stays within -42 and
56 whatever the weights do, which is why the input of the down projection fits e4m3 (largest value 448) unscaled.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_kernels.reference.moe import swiglu
from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style


def curve(config: ModelConfig, gates: torch.Tensor, up: float) -> torch.Tensor:
    """h for every gate at one value of up. gates: [N] -> [N] float64."""
    pairs = torch.stack([gates.double(), torch.full_like(gates.double(), up)], dim=-1)      # [N, 2]: gate, up
    return swiglu(pairs, config.swiglu_alpha, config.swiglu_limit)[:, 0]


def figure(config: ModelConfig, ups: Sequence[float] = (-8, -1, 0, 3, 8)) -> go.Figure:
    """h against the gate for a few values of up."""
    gates = torch.linspace(-12, 12, 97, dtype=torch.float64)
    fig = go.Figure()
    for up in ups:
        fig.add_scatter(x=gates.tolist(), y=curve(config, gates, up).tolist(), name=f"up {up:g}", mode="lines")
    fig.add_vline(x=config.swiglu_limit, line={"color": style.MUTED, "dash": "dot"})
    fig.update_xaxes(title_text="gate, before the clamp")
    fig.update_yaxes(title_text="output h")
    low, high = (float(curve(config, torch.tensor([99.0]), u)[0]) for u in (-99.0, 99.0))
    return style.finish(
        fig, f"Whatever comes in, h stays between {low:.1f} and {high:.1f}", "live",
        f"alpha {config.swiglu_alpha}, limit {config.swiglu_limit:g} (dotted): gate clamped above, up on both sides",
    )
