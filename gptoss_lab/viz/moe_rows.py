"""Where the rows of a batch go: sorted by expert, padded to whole tiles, and found again by the inverse map.

A grouped GEMM multiplies rows that lie side by side, one weight per tile of rows. So every (token, expert) pair gets a
row of a buffer, sorted by expert and inside an expert in token order; each expert starts at a multiple of the tile
height. `row_of` is the way back: the combine reads a token's k rows there. The kernel of `gptoss_kernels.moe.routing`
does this on the device without telling the host; here it is a stable sort, the form to read.
"""
from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from gptoss_kernels.moe.layout import GroupLayout, group_layout
from gptoss_kernels.reference.moe import route
from gptoss_lab.viz import style

COLOURS = (style.BLUE, style.RED, style.GREEN, style.OCHRE, style.PURPLE, style.TEAL)


@dataclass(frozen=True)
class Placed:
    """layout: sizes, padded sizes and first row of each expert. row_of: [T, k] int64, the row of each choice.
    token_of: [layout.total] int64, the token of each row, -1 for padding."""

    layout: GroupLayout
    row_of: torch.Tensor
    token_of: torch.Tensor


def sampled_ids(
    tokens: int, num_experts: int, experts_per_token: int, skew: float = 0.0, seed: int = 0
) -> torch.Tensor:
    """[T, k] expert ids of random tokens: normal logits, and expert number r (from 1) handicapped by skew * ln r.

    skew 0 is even routing; with a larger one a few experts get most rows. The benchmark skews in the same way.
    """
    g = torch.Generator().manual_seed(seed)
    handicap = skew * torch.arange(1, num_experts + 1).log()
    return route(torch.randn(tokens, num_experts, generator=g) - handicap, experts_per_token)[0]


def expert_sizes(ids: torch.Tensor, num_experts: int) -> list[int]:
    """Rows of each expert. ids: [T, k]."""
    return torch.bincount(ids.flatten(), minlength=num_experts).tolist()


def place(ids: torch.Tensor, num_experts: int, align: int) -> Placed:
    """Give every choice its row. ids: [T, k] expert ids. align: rows of a tile."""
    layout = group_layout(expert_sizes(ids, num_experts), align)
    flat = ids.flatten()                                                # [T k], tokens in order
    order = torch.sort(flat, stable=True).indices                      # choices, by expert and then by token
    first = torch.tensor(layout.starts) - torch.cumsum(torch.tensor((0, *layout.sizes[:-1])), 0)
    rows = torch.arange(flat.numel()) + first[flat[order]]
    row_of = torch.empty_like(flat).scatter_(0, order, rows)
    token_of = torch.full((layout.total,), -1).scatter_(0, rows, order // ids.shape[1])
    return Placed(layout, row_of.view_as(ids), token_of)


def map_figure(ids: torch.Tensor, num_experts: int, align: int) -> go.Figure:
    """A few tokens: what each chose and where its rows lie (above), and the buffer (below). Colours are experts."""
    placed = place(ids, num_experts, align)
    owner = torch.full((placed.layout.total,), -1)
    owner[placed.row_of.flatten()] = ids.flatten()
    fig = make_subplots(rows=2, cols=1, row_heights=[0.56, 0.44], vertical_spacing=0.3,
                        subplot_titles=["choices and their rows, row_of", "buffer: its tokens, grey is padding"])
    text = [[f"row {r}" for r in column] for column in placed.row_of.T.tolist()]
    names = [f"{n + 1}. choice" for n in range(ids.shape[1])]
    shared = {"colorscale": _steps(num_experts), "zmin": -1.5, "zmax": num_experts - 0.5, "xgap": 2, "ygap": 2,
              "texttemplate": "%{text}", "showscale": False, "textfont": {"color": "white"}}
    fig.add_heatmap(z=ids.T.tolist(), x=list(range(ids.shape[0])), y=names, text=text, row=1, col=1, **shared,
                    hovertemplate="token %{x}, expert %{z}: %{text}<extra></extra>")
    marks = [str(t) if t >= 0 else "" for t in placed.token_of.tolist()]
    fig.add_heatmap(z=[owner.tolist()], x=list(range(len(marks))), y=["token"], text=[marks], row=2, col=1, **shared,
                    hovertemplate="row %{x}: token %{text}, expert %{z}<extra></extra>")
    for expert in range(num_experts):
        fig.add_scatter(x=[None], y=[None], mode="markers", name=f"expert {expert}", row=1, col=1,
                        marker={"symbol": "square", "size": 11, "color": COLOURS[expert % len(COLOURS)]})
    fig.update_annotations(font_size=13)
    fig.update_xaxes(showgrid=False, dtick=1)
    fig.update_xaxes(title_text="token", row=1, col=1)
    fig.update_xaxes(title_text="row of the buffer", row=2, col=1, dtick=align)
    fig.update_yaxes(showgrid=False, title_text="", autorange="reversed")
    real = ids.numel()
    return style.finish(fig, f"{real} rows in tiles of {align}: {placed.layout.total} with the padding", "live",
                        f"{ids.shape[0]} random tokens, {ids.shape[1]} of {num_experts} experts each", height=430,
                        margin={"t": 104}, legend={"y": -0.2})


def rows_figure(tokens: int, num_experts: int, experts_per_token: int, align: int, skew: float = 0.0) -> go.Figure:
    """Rows and padding of every expert for a batch of random tokens."""
    layout = group_layout(expert_sizes(sampled_ids(tokens, num_experts, experts_per_token, skew), num_experts), align)
    padding = [whole - real for whole, real in zip(layout.aligned, layout.sizes, strict=True)]
    fig = go.Figure()
    for name, values, colour in (("rows", layout.sizes, style.BLUE), ("padding", padding, style.OCHRE)):
        fig.add_bar(x=list(range(num_experts)), y=list(values), name=name, marker_color=colour,
                    hovertemplate="expert %{x}: %{y} " + name + "<extra></extra>")
    fig.update_xaxes(title_text="expert", showgrid=False)
    fig.update_yaxes(title_text="rows of the buffer")
    real, hit = sum(layout.sizes), sum(size > 0 for size in layout.sizes)
    return style.finish(
        fig, f"{tokens:,} tokens: {real:,} rows, {layout.total:,} in tiles of {align}; {hit} of {num_experts} experts",
        "live", f"random tokens, skew {skew:g}; largest expert {100 * max(layout.sizes) / real:.1f} % of the rows",
        barmode="stack", bargap=0.15, height=400, legend={"traceorder": "normal"},
    )


def _steps(num_experts: int) -> list[list[object]]:
    """A colour scale with one flat step per expert, from -1 (padding) on."""
    colours = (style.GREY, *(COLOURS[n % len(COLOURS)] for n in range(num_experts)))
    edges = [n / len(colours) for n in range(len(colours) + 1)]
    return [[edge, colour] for n, colour in enumerate(colours) for edge in (edges[n], edges[n + 1])]
