"""The keys and values of one prompt as pages on a link, to scale: which layer's bytes take how long.

A page is 64 positions of one layer: 131,072 bytes in both models. A full layer of an 8192-token prompt sends 128 of
them, a sliding one the 127 rows that a later token can still see.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

PAGE = 64
RATES = (250.0, 373.0)
"""GB/s: what this project asks of a hand-over, and what a plain copy between two H200s reached (figures.csv)."""


@dataclass(frozen=True)
class LayerPages:
    """rows: positions that travel. size: their bytes, keys and values. start: bytes of all layers before."""

    layer: int
    sliding: bool
    rows: int
    size: int
    start: int

    @property
    def pages(self) -> int:
        """Pages that hold the rows, the last perhaps in part."""
        return -(-self.rows // PAGE)


def layer_pages(config: ModelConfig, length: int, value_bytes: int = 2) -> list[LayerPages]:
    """What each layer sends, in order. ValueError for an empty prompt."""
    if length < 1:
        raise ValueError(f"a prompt of {length} tokens; at least 1 is expected")
    found, start = [], 0
    for n in range(config.num_layers):
        sliding = config.is_sliding(n)
        rows = min(length, config.sliding_window - 1) if sliding else length
        found.append(LayerPages(n, sliding, rows, rows * 2 * config.kv_size * value_bytes, start))
        start += found[-1].size
    return found


def page_owners(config: ModelConfig, length: int) -> list[int]:
    """The layer of each page, in the order in which pages are sent."""
    return [one.layer for one in layer_pages(config, length) for _ in range(one.pages)]


def figure(config: ModelConfig, length: int, rates: Sequence[float] = RATES, columns: int = 65) -> go.Figure:
    """Every page a square, line by line in the order of the layers; beside the lines the time on either link."""
    layers, owners = layer_pages(config, length), page_owners(config, length)
    total = layers[-1].start + layers[-1].size
    lines = [owners[at : at + columns] for at in range(0, len(owners), columns)]
    shades = [[0 if config.is_sliding(n) else 1 + n // 2 % 2 for n in line] for line in lines]
    fig = go.Figure(go.Heatmap(
        z=[line + [None] * (columns - len(line)) for line in shades], customdata=lines, xgap=1, ygap=1,
        colorscale=[[0, style.OCHRE], [0.5, style.BLUE], [1, "#86b2da"]], zmin=0, zmax=2, showscale=False,
        hovertemplate="layer %{customdata}<extra></extra>"))
    for name, colour in ((f"sliding layer: {layers[0].size / 1e6:.2f} MB", style.OCHRE),
                         (f"full layers, in turn: {layers[1].size / 1e6:.2f} MB each", style.BLUE)):
        fig.add_bar(x=[None], y=[None], marker_color=colour, name=name)
    fig.add_scatter(x=[None], y=[0], yaxis="y2", showlegend=False)
    marks = list(range(0, len(lines) + 1, 6))
    spent = [[f"{at / len(lines) * total / (1e6 * rate):.2f}" for at in marks] for rate in rates]
    axis = {"range": [len(lines) - 0.5, -0.5], "tickvals": [at - 0.5 for at in marks], "showgrid": False}
    fig.update_xaxes(title_text=f"a square is a page: {PAGE} positions of one layer", showticklabels=False, ticks="")
    fig.update_layout(
        yaxis={**axis, "ticktext": spent[0], "title": {"text": f"ms at {rates[0]:g} GB/s"}},
        yaxis2={**axis, "ticktext": spent[1], "title": {"text": f"ms at {rates[1]:g} GB/s"}, "overlaying": "y",
                "side": "right"})
    share = sum(one.size for one in layers if one.sliding) / total
    title = f"{len(owners):,} pages, {total / 1e6:.1f} MB: the sliding half of the layers is {share:.1%} of it"
    return style.finish(fig, title, "modelled", f"{config.name}, {length:,} tokens, bf16, to scale, in the order of "
                        "the layers", height=540, legend={"y": -0.1}, margin={"r": 70})


def bytes_table(config: ModelConfig, length: int, rates: Sequence[float] = RATES) -> Table:
    """One line per kind of layer and one for all: layers, rows, pages, bytes, ms at each rate."""
    layers, lines = layer_pages(config, length), []
    kinds = (("full", [o for o in layers if not o.sliding]), ("sliding", [o for o in layers if o.sliding]),
             ("all", layers))
    for name, own in kinds:
        size = sum(one.size for one in own)
        rows = f"{own[0].rows:,}" if name != "all" else ""
        lines.append([name, len(own), rows, sum(one.pages for one in own), size,
                      *(f"{size / (1e6 * rate):.3f}" for rate in rates), "modelled"])
    return table(lines, ["layers", "how many", "rows each", "pages", "bytes", *(f"ms at {r:g} GB/s" for r in rates),
                         "origin"])
