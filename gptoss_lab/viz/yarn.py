"""YaRN's ramp, and what rounding its two bounds does to the frequencies.

A head of 64 elements turns in 32 pairs. YaRN leaves the fast pairs alone, divides the slow ones by 32, and blends
between two pair indices, 8.09 and 17.40. Rounding them outward to 8 and 18, which is what the common implementation
does unless told otherwise, moves the blend of pairs 9 to 17; the last of them by 76 per cent.
"""
from __future__ import annotations

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from gptoss_kernels.reference.rope import rope_frequencies, rope_ramp
from gptoss_lab.config import RopeConfig
from gptoss_lab.viz import style


def frequencies(rope: RopeConfig, head_dim: int, truncate: bool) -> torch.Tensor:
    """omega [head_dim / 2] float64, radians per position, with the ramp's bounds rounded (`truncate`) or not."""
    return rope_frequencies(
        head_dim, rope.theta, rope.factor, rope.beta_fast, rope.beta_slow, rope.original_context, truncate
    )


def rounding_error(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Per cent by which rounding changes each pair's frequency: [head_dim / 2], 76.3 at pair 17 for gpt-oss."""
    return (frequencies(rope, head_dim, True) / frequencies(rope, head_dim, False) - 1) * 100


def figure(rope: RopeConfig, head_dim: int) -> go.Figure:
    """Frequencies of every pair in three forms (plain, unrounded, rounded), and the difference in per cent below."""
    pairs = list(range(head_dim // 2))
    plain = rope.theta ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    error = rounding_error(rope, head_dim)
    low, high = rope_ramp(head_dim, rope.theta, rope.beta_fast, rope.beta_slow, rope.original_context)
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.08)
    lines = (
        ("no stretching", plain, style.GREY, "dot"),
        ("bounds rounded", frequencies(rope, head_dim, True), style.RED, "dash"),
        ("bounds as they are", frequencies(rope, head_dim, False), style.BLUE, "solid"),
    )
    for name, omega, colour, dash in lines:
        fig.add_scatter(x=pairs, y=omega.tolist(), name=name, mode="lines+markers", marker_size=5,
                        line={"color": colour, "dash": dash}, row=1, col=1)
    fig.add_bar(x=pairs, y=error.tolist(), marker_color=style.RED, showlegend=False, row=2, col=1,
                text=[f"{e:.1f}" if abs(e) > 0.05 else "" for e in error.tolist()], textposition="outside",
                textfont_size=11, constraintext="none", cliponaxis=False)
    fig.add_vrect(x0=low, x1=high, fillcolor=style.BLUE, opacity=0.07, line_width=0)
    fig.update_yaxes(type="log", title_text="radians per position", exponentformat="power", tickfont_size=11,
                     row=1, col=1)
    fig.update_yaxes(title_text="rounded, % off", range=[-12, max(20.0, float(error.max()) * 1.35)], row=2, col=1)
    fig.update_xaxes(title_text="pair of head elements (i, i + head_dim/2)", dtick=4, row=2, col=1)
    worst = int(error.abs().argmax())
    return style.finish(
        fig, f"Rounding the ramp's bounds puts pair {worst} off by {float(error[worst]):.1f} %", "modelled",
        f"YaRN, ramp from pair {low:.2f} to {high:.2f} (shaded), factor {rope.factor:g}", height=560,
        legend={"y": -0.14},
    )
