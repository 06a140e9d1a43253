"""Which bytes of a checkpoint are what, and what they become in FP8 and bf16.

All numbers come from the manifest, the list of tensors derived from the config, so no weights are needed: the same
picture for nano and for the 60.8 GiB of the 120B.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gptoss_lab.checkpoint.manifest import bytes_by_role, manifest
from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style

FORMATS = {"hf": "MXFP4", "fp8": "FP8", "bf16": "bf16"}
PARTS = {                                                   # what is drawn together
    "expert codes": ("expert weights",), "expert scales": ("expert scales",), "expert biases": ("expert biases",),
    "attention": ("attention", "sinks"), "embedding, unembedding": ("embedding", "unembedding"),
    "router and norms": ("router", "norms"),
}
COLOURS = dict(zip(PARTS, (style.OCHRE, style.RED, style.GREY, style.BLUE, style.PURPLE, style.GREEN), strict=True))


def byte_parts(config: ModelConfig, layout: str) -> dict[str, int]:
    """Bytes of each part. layout: "hf" (as released, MXFP4), "fp8" or "bf16". They sum to the whole checkpoint."""
    roles = bytes_by_role(manifest(config, layout))
    return {part: sum(roles.get(role, 0) for role in members) for part, members in PARTS.items()}


def formats_figure(configs: Sequence[ModelConfig]) -> go.Figure:
    """Bytes of each model in three formats, split by part."""
    rows = [(config, layout) for config in configs for layout in FORMATS]
    sizes = [byte_parts(config, layout) for config, layout in rows]
    names = [f"{config.name.removeprefix('gpt-oss-')}, {FORMATS[layout]}" for config, layout in rows]
    fig = go.Figure()
    for part, colour in COLOURS.items():
        values = [size[part] / 2**30 for size in sizes]
        fig.add_bar(y=names, x=values, name=part, orientation="h", marker_color=colour,
                    customdata=[size[part] for size in sizes],
                    hovertemplate="%{y}: " + part + " %{customdata:,} bytes<extra></extra>")
    for name, size in zip(names, sizes, strict=True):
        total = sum(size.values())
        fig.add_annotation(x=total / 2**30, y=name, text=f" {style.binary(total)}", showarrow=False, xanchor="left")
    fig.update_xaxes(title_text="GiB", range=[0, max(sum(s.values()) for s in sizes) / 2**30 * 1.15])
    fig.update_yaxes(autorange="reversed")
    first = configs[-1]
    share = sum(byte_parts(first, "hf")[p] for p in ("expert codes", "expert scales"))
    share /= sum(byte_parts(first, "hf").values())
    return style.finish(
        fig, f"Expert weights are {100 * share:.0f} % of the released {first.name}; FP8 nearly doubles them",
        "modelled", "bytes of every tensor, from the configuration alone", barmode="stack",
        height=170 + 44 * len(rows), legend={"y": -0.2, "traceorder": "normal"},
    )


def treemap_figure(config: ModelConfig, layout: str = "hf") -> go.Figure:
    """One checkpoint as areas: each part's share of the bytes."""
    parts = byte_parts(config, layout)
    total = sum(parts.values())
    fig = go.Figure(go.Treemap(
        labels=list(parts), parents=[""] * len(parts), values=list(parts.values()),
        marker={"colors": [COLOURS[p] for p in parts], "line": {"width": 2, "color": "white"}},
        text=[f"{style.binary(v)}, {100 * v / total:.2g} %" for v in parts.values()],
        texttemplate="%{label}<br>%{text}", hovertemplate="%{label}: %{value:,} bytes<extra></extra>",
        tiling={"pad": 2},
    ))
    return style.finish(
        fig, f"{config.name} in {FORMATS[layout]}: {total:,} bytes ({style.binary(total)})", "modelled",
        "areas are bytes, from the configuration alone", height=430, margin={"l": 10, "r": 10, "t": 80, "b": 10},
    )
