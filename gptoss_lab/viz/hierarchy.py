"""The model as a map: what one token passes through, with the shape of every weight on the way.

`blocks` lists the steps from a config, so the map is the same for nano, 20B and 120B; `figure` draws them, the layer
once with its two residual branches side by side.
"""
from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style

KINDS = {"norm": style.GREY, "attention": style.BLUE, "moe": style.OCHRE, "vocabulary": style.PURPLE}


@dataclass(frozen=True)
class Block:
    """One step: where it stands (column and row of the map), its kind, its weights, and what it does in a few words."""

    name: str
    kind: str
    column: int
    row: int
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    note: str

    @property
    def parameters(self) -> int:
        """Weights of this step in one layer, or in the model for the steps outside the layers."""
        total = 0
        for _, shape in self.weights:
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    @property
    def in_layer(self) -> bool:
        """Whether every layer has this step."""
        return self.column in (1, 2)


def blocks(config: ModelConfig) -> list[Block]:
    """Every step with weights, in the order a token meets them. Linear weights are [out, in]."""
    h, i, e, q = config.hidden_size, config.intermediate_size, config.num_experts, config.q_size
    return [
        Block("embedding", "vocabulary", 0, 0, (("weight", (config.vocab_size, h)),), "token id to vector"),
        Block("RMSNorm", "norm", 1, 0, (("scale", (h,)),), "rescale"),
        Block("QKV projection", "attention", 1, 1, (("weight", (config.qkv_size, h)), ("bias", (config.qkv_size,))),
              f"{config.num_heads} query, {config.num_kv_heads} key, {config.num_kv_heads} value heads"),
        Block("attention", "attention", 1, 2, (("sinks", (config.num_heads,)),),
              f"YaRN, sink per head<br>even layers: window {config.sliding_window}"),
        Block("output projection", "attention", 1, 3, (("weight", (h, q)), ("bias", (h,))), "heads to residual"),
        Block("RMSNorm", "norm", 2, 0, (("scale", (h,)),), "rescale"),
        Block("router", "moe", 2, 1, (("weight", (e, h)), ("bias", (e,))),
              f"top {config.experts_per_token} of {e}, then softmax"),
        Block("experts: gate and up", "moe", 2, 2, (("weight", (e, 2 * i, h)), ("bias", (e, 2 * i))), "clamped SwiGLU"),
        Block("experts: down", "moe", 2, 3, (("weight", (e, h, i)), ("bias", (e, h))), "weighted sum"),
        Block("final RMSNorm", "norm", 3, 0, (("scale", (h,)),), "rescale"),
        Block("unembedding", "vocabulary", 3, 1, (("weight", (config.vocab_size, h)),), "vector to logits"),
    ]


def parameters(config: ModelConfig) -> int:
    """All parameters of the model: 20,914,757,184 for gpt-oss-20b."""
    return sum(b.parameters * (config.num_layers if b.in_layer else 1) for b in blocks(config))


def figure(config: ModelConfig) -> go.Figure:
    """The map of the model."""
    fig = go.Figure()
    width, height, gap_x, gap_y = 2.3, 1.0, 0.35, 0.3
    for block in blocks(config):
        x, y = block.column * (width + gap_x), -block.row * (height + gap_y)
        _box(fig, block, x, y, width, height)
        if block.row:
            _arrow(fig, x + width / 2, y + height + gap_y, x + width / 2, y + height)
    left, right = width + gap_x / 2, 3 * (width + gap_x) - gap_x / 2
    fig.add_shape(type="rect", x0=left, x1=right, y0=-3 * (height + gap_y) - 0.6, y1=height + 0.45,
                  line={"color": style.MUTED, "dash": "dot"}, layer="below")
    fig.add_annotation(x=(left + right) / 2, y=height + 0.3, showarrow=False,
                       text=f"one layer, {config.num_layers} times: x = x + attention(x), then x = x + experts(x)")
    for column, label in ((1, "+ x"), (2, "+ x")):
        fig.add_annotation(x=column * (width + gap_x) + width / 2, y=-3 * (height + gap_y) - 0.3, showarrow=False,
                           text=f"<b>{label}</b>")
    for column in (0, 1, 2):
        start = (column + 1) * (width + gap_x) - gap_x
        _arrow(fig, start, height / 2, start + gap_x, height / 2)
    fig.update_xaxes(visible=False, range=[-0.1, 4 * (width + gap_x)])
    fig.update_yaxes(visible=False, range=[-3 * (height + gap_y) - 0.65, height + 0.55])
    return style.finish(
        fig, f"{config.name}: {parameters(config):,} parameters, nearly all of them in the experts", "modelled",
        "shapes [out, in] from the configuration; in italics the parameters of one step", height=600, width=940,
        margin={"l": 10, "r": 10, "t": 80, "b": 10}, showlegend=False,
    )


def _box(fig: go.Figure, block: Block, x: float, y: float, width: float, height: float) -> None:
    colour = KINDS[block.kind]
    fig.add_shape(type="rect", x0=x, x1=x + width, y0=y, y1=y + height, line={"color": colour, "width": 2},
                  fillcolor="white", layer="below")
    shapes = "<br>".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in block.weights)
    fig.add_annotation(x=x + width / 2, y=y + height / 2, showarrow=False, align="center", font={"size": 11},
                       text=f"<b>{block.name}</b><br>{shapes}<br>{block.note}<br><i>{block.parameters:,}</i>")


def _arrow(fig: go.Figure, x0: float, y0: float, x1: float, y1: float) -> None:
    fig.add_annotation(x=x1, y=y1, ax=x0, ay=y0, xref="x", yref="y", axref="x", ayref="y", showarrow=True, arrowhead=2,
                       arrowwidth=1.2, arrowcolor=style.MUTED, text="")
