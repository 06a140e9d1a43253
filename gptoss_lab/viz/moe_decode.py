"""Decode: a step reads the experts that its tokens chose, once. How many are those, and how many bytes in which form?

Counts and bytes come from `gptoss_lab.cost` (even, independent choices). In decode the GEMMs wait for these bytes, so
half the bytes is nearly half the time; that is the case for keeping MXFP4 packed where tokens are few.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import H200, expected_distinct_experts
from gptoss_lab.cost.formats import expert_bytes_touched
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FORMS = {"fp8": ("FP8 blocks", style.BLUE), "mxfp4": ("MXFP4, packed", style.OCHRE)}


def figure(configs: Sequence[ModelConfig], batches: Sequence[int] = BATCHES) -> go.Figure:
    """Left: share of a layer's experts that a batch touches. Right: bytes of the last model's experts per step."""
    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.13,
                        subplot_titles=["experts touched, % of a layer's", f"{configs[-1].name}: expert GB per step"])
    for config, colour, dash in zip(configs, (style.GREEN, style.PURPLE), ("solid", "dash"), strict=True):
        share = [100 * expected_distinct_experts(config, b) / config.num_experts for b in batches]
        fig.add_scatter(x=list(batches), y=share, mode="lines+markers", line={"color": colour, "dash": dash}, row=1,
                        col=1, name=config.name, hovertemplate="batch %{x}: %{y:.1f} %<extra>%{fullData.name}</extra>")
    for form, (name, colour) in FORMS.items():
        amount = [expert_bytes_touched(configs[-1], b, form) / 1e9 for b in batches]
        fig.add_scatter(x=list(batches), y=amount, mode="lines+markers", line={"color": colour}, name=name, row=1,
                        col=2, hovertemplate="batch %{x}: %{y:.1f} GB<extra>" + name + "</extra>")
    fig.update_annotations(font_size=13)
    fig.update_xaxes(type="log", title_text="tokens in the step", tickvals=list(batches),
                     ticktext=[str(b) for b in batches])
    fig.update_yaxes(title_text="%", range=[0, 104], row=1, col=1)
    fig.update_yaxes(title_text="GB", rangemode="tozero", row=1, col=2)
    touched = expected_distinct_experts(configs[-1], 32)
    return style.finish(
        fig, f"At batch 32 a step of {configs[-1].name} reads {touched:.0f} of {configs[-1].num_experts} experts",
        "modelled", "in every layer, for even, independent choices; weights, scales and biases of the experts touched",
        height=430, margin={"t": 104})


def bytes_table(config: ModelConfig, batches: Sequence[int] = BATCHES) -> Table:
    """Distinct experts and the bytes of a step in both forms, with the time at the datasheet's bandwidth."""
    lines = []
    for batch in batches:
        fp8, packed = (expert_bytes_touched(config, batch, form) for form in FORMS)
        fp8_ms, packed_ms = (1e3 * amount / H200.memory_bytes_per_second for amount in (fp8, packed))
        lines.append([batch, f"{expected_distinct_experts(config, batch):.1f}", f"{fp8 / 1e9:.1f}",
                      f"{packed / 1e9:.1f}", f"{fp8_ms:.1f}", f"{packed_ms:.1f}", f"{packed / fp8:.3f}", "modelled"])
    return table(lines, ["batch", "experts per layer", "FP8, GB", "MXFP4, GB", "FP8, ms", "MXFP4, ms", "ratio",
                         "origin"])
