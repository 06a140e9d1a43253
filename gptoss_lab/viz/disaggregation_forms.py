"""Which form of the expert weights suits which side: FP8 where FLOPs decide, packed MXFP4 where bytes do.

Hopper multiplies FP8 and no FP4, so packed weights are unpacked in the kernel to bf16, at half the FP8 rate. A server
that does both phases has to take one form for both; two pools need not.
"""
from __future__ import annotations

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import RELEASED, Precision, decode_bound, prefill_bound
from gptoss_lab.cost.formats import expert_bytes_touched
from gptoss_lab.cost.memory import max_sequences, weight_bytes_per_gpu
from gptoss_lab.cost.precision import FP8_EXPERTS
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

FORMS: dict[str, tuple[str, Precision]] = {"FP8": ("fp8", FP8_EXPERTS), "packed MXFP4": ("mxfp4", RELEASED)}
CONTEXT = 8192


def forms_table(config: ModelConfig, batch: int = 32, tokens: int = CONTEXT) -> Table:
    """One line per form: expert GB of a decode step, ms of step and prefill at the bound, sequences that fit."""
    lines = []
    for name, (form, precision) in FORMS.items():
        lines.append([
            name, f"{expert_bytes_touched(config, batch, form) / 1e9:.1f}",
            f"{1e3 * decode_bound(config, tokens, batch, precision).sequential_seconds:.1f}",
            f"{1e3 * prefill_bound(config, tokens, precision=precision).sequential_seconds:.1f}",
            f"{weight_bytes_per_gpu(config, precision) / 1e9:.0f}", max_sequences(config, tokens, precision),
            "modelled"])
    return table(lines, ["expert weights", f"GB of experts a step, batch {batch}", "decode step, ms",
                         f"prefill of {tokens:,}, ms", "weights, GB", f"sequences of {tokens:,} that fit", "origin"])


def sides(config: ModelConfig, batch: int = 32, tokens: int = CONTEXT) -> dict[str, tuple[float, float]]:
    """Form -> seconds at the bound of (a prefill, a decode step), one H200."""
    return {name: (prefill_bound(config, tokens, precision=precision).sequential_seconds,
                   decode_bound(config, tokens, batch, precision).sequential_seconds)
            for name, (_, precision) in FORMS.items()}


def figure(config: ModelConfig, batch: int = 32, tokens: int = CONTEXT) -> go.Figure:
    """Both phases in both forms, each over the better one."""
    found, fig = sides(config, batch, tokens), go.Figure()
    names = [f"prefill of {tokens:,} tokens", f"decode step, batch {batch}"]
    best = [min(seconds[side] for seconds in found.values()) for side in (0, 1)]
    for (name, seconds), colour in zip(found.items(), (style.BLUE, style.OCHRE), strict=True):
        fig.add_bar(x=names, y=[s / b for s, b in zip(seconds, best, strict=True)], name=name, marker_color=colour,
                    text=[f"{1e3 * s:.1f} ms" for s in seconds], textposition="outside", cliponaxis=False)
    fig.update_yaxes(title_text="time over the better form", rangemode="tozero")
    fp8, packed = found["FP8"], found["packed MXFP4"]
    title = (f"Packed weights make prefill {packed[0] / fp8[0]:.2f} times as long, FP8 makes decode "
             f"{fp8[1] / packed[1]:.2f} times")
    return style.finish(fig, title, "modelled", f"{config.name}, one H200 at its datasheet", barmode="group",
                        legend={"y": -0.15})
