"""The exponents inside one 128x128 block of MXFP4, and which of them e4m3 can hold under one shared scale.

An MXFP4 value is code * 2^exponent with one exponent per 32 inputs, so a 128x128 block holds 128 x 4 exponents. With
the block scale 2^(e_max - 6), a group `d` below the largest exponent needs code * 2^(6 - d) as an e4m3 number. Up to
d = 14 every code is one; from 15 on some codes fall between two e4m3 numbers, and which ones is shown here by doing it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from gptoss_lab.checkpoint.mxfp4 import GROUP, VALUES
from gptoss_lab.viz import style

HELD = 15          # consecutive exponents whose MXFP4 values are all e4m3 values
_TOP = 6           # the largest exponent of a block is moved to 2^6: 6 * 64 = 384 <= 448
_BIAS = 127        # of an MXFP4 scale byte


def block_exponents(scales: torch.Tensor, block_row: int, block_col: int, block: int = 128) -> torch.Tensor:
    """Exponents of one block. scales: [N, K / 32] uint8 of one expert's matrix. Returns [<= 128, <= 4] int32.

    The last block of an axis that is no multiple of 128 is smaller. IndexError names a block that does not exist.
    """
    rows, groups = scales.shape
    across = block // GROUP
    if not (0 <= block_row * block < rows and 0 <= block_col * across < groups):
        raise IndexError(f"block ({block_row}, {block_col}) does not exist; the matrix has "
                         f"{-(-rows // block)} x {-(-groups // across)} of them")
    part = scales[block_row * block : (block_row + 1) * block, block_col * across : (block_col + 1) * across]
    return part.to(torch.int32) - _BIAS


def spreads(scales: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Largest minus smallest exponent of every block. scales: [..., N, K / 32] uint8 -> [..., blocks, blocks] int32.

    Groups count whatever their codes, so an all-zero group may make the spread look larger than what matters.
    """
    rows, groups = scales.shape[-2:]
    across = block // GROUP
    wide = scales.to(torch.float32).reshape(-1, 1, rows, groups)
    pad = (0, -groups % across, 0, -rows % block)
    high = torch.nn.functional.pad(wide, pad, value=-torch.inf)
    low = torch.nn.functional.pad(wide, pad, value=torch.inf)
    top = torch.nn.functional.max_pool2d(high, (block, across))
    bottom = -torch.nn.functional.max_pool2d(-low, (block, across))
    return (top - bottom).to(torch.int32).reshape(*scales.shape[:-2], *top.shape[-2:])


def spread_counts(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Spread -> blocks with it, over the rows of a conversion's manifest, in ascending order."""
    found: Counter[int] = Counter()
    for row in rows:
        for spread, count in (row.get("statistics") or {}).get("spreads", {}).items():
            found[int(spread)] += count
    return dict(sorted(found.items()))


def code_errors(distances: range = range(21)) -> torch.Tensor:
    """Relative error of each positive MXFP4 value in e4m3, `d` exponents below the block's largest.

    Returns [7, len(distances)] float64: rows 0.5 ... 6, 0 where the code lands exactly, 1 where it is flushed to zero.
    """
    codes = torch.tensor([v for v in VALUES if v > 0], dtype=torch.float64)
    wanted = codes[:, None] * 2.0 ** (_TOP - torch.tensor(list(distances), dtype=torch.float64))[None, :]
    held = wanted.to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64)
    return (held - wanted).abs() / wanted


def block_figure(exponents: torch.Tensor, origin: str, what: str) -> go.Figure:
    """One block as a heatmap of its exponents, and how often each occurs beside the 15 that e4m3 holds."""
    rows, groups = exponents.shape
    top, bottom = int(exponents.max()), int(exponents.min())
    values, counts = torch.unique(exponents, return_counts=True)
    fig = make_subplots(rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.2)
    fig.add_heatmap(
        z=exponents.tolist(), x=[16 + 32 * g for g in range(groups)], y=list(range(rows)), xgap=2, row=1, col=1,
        colorscale=style.SEQUENTIAL, colorbar={"title": {"text": "exponent"}, "x": 0.46, "len": 0.9},
        hovertemplate="row %{y}, group around column %{x}: 2^%{z}<extra></extra>",
    )
    fig.add_bar(y=values.tolist(), x=counts.tolist(), orientation="h", marker_color=style.BLUE, row=1, col=2,
                showlegend=False, hovertemplate="2^%{y}: %{x} groups<extra></extra>")
    fig.add_hrect(y0=top - HELD + 0.5, y1=top + 0.5, fillcolor=style.GREEN, opacity=0.12, line_width=0, row=1, col=2)
    fig.update_xaxes(title_text="input column (one exponent per 32)", dtick=32, range=[0, 32 * groups], row=1, col=1)
    fig.update_yaxes(title_text="output row", autorange="reversed", dtick=32, row=1, col=1)
    fig.update_xaxes(title_text="groups with this exponent", row=1, col=2)
    fig.update_yaxes(title_text="exponent", range=[min(bottom, top - HELD) - 0.5, top + 1.5], row=1, col=2)
    fits = top - bottom < HELD
    verdict = "all inside" if fits else "not all inside"
    return style.finish(
        fig, f"A block's exponents span {top - bottom + 1}: {verdict} the {HELD} that e4m3 holds (green)",
        origin, what, height=470,
    )


def figure_at(scales: torch.Tensor, row: int, column: int) -> go.Figure:
    """`block_figure` of the block at (row, column) of one matrix. scales: [N, K / 32] uint8."""
    return block_figure(block_exponents(scales, row, column), "live", f"block ({row}, {column})")


def code_figure(distances: range = range(21)) -> go.Figure:
    """Which MXFP4 value survives e4m3 at which distance below its block's largest exponent: exact, rounded, or lost."""
    error = code_errors(distances)
    names = [f"{v:g}" for v in VALUES if v > 0]
    text = [["" if e == 0 else f"{100 * e:.0f}" for e in row] for row in error.tolist()]
    fig = go.Figure(go.Heatmap(
        z=error.tolist(), x=list(distances), y=names, text=text, texttemplate="%{text}", xgap=2, ygap=2, zmin=0, zmax=1,
        colorscale=[[0, "#dcebdf"], [1e-9, "#f6dcc9"], [1, style.RED]], showscale=False,
        hovertemplate="code %{y}, %{x} below: %{text} % off<extra></extra>",
    ))
    fig.add_vline(x=HELD - 0.5, line={"color": style.INK, "dash": "dash", "width": 1.5})
    fig.update_xaxes(title_text="exponents below the largest of the block", dtick=1, showgrid=False)
    fig.update_yaxes(title_text="MXFP4 code (magnitude)", showgrid=False, type="category")
    return style.finish(
        fig, "Fifteen exponents are exact for every code (green); beyond them it depends on the code", "live",
        "each value cast to e4m3 with the block scale 2^(e_max - 6); numbers: per cent off", height=400,
    )
