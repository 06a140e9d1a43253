"""The fused epilogue: SwiGLU and e4m3 again before the first product leaves the registers.

256 interleaved columns of gate and up are 128 results, and 128 results are one scale group of the next GEMM. So a tile
of 256 columns needs nobody else's numbers for its scales, and what is written is one byte per result, not two bf16
numbers. Within the tile the weight rows arrive in another order, so that each thread's results lie side by side.
"""
from __future__ import annotations

import plotly.graph_objects as go
import torch

from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.quant import quantise_groups
from gptoss_lab.viz import style

ROWS = 32           # weight rows that are reordered among themselves
QUAD = 4            # threads that hold one row of a tensor core's output, two columns in eight each


def place_of(row: int, reordered: bool) -> int:
    """Column of the tensor core's output for weight row `row` of 32; reordered: 8 q + 2 j + s goes to 8 j + 2 q + s."""
    if not 0 <= row < ROWS:
        raise ValueError(f"place_of: row {row}; 0 to {ROWS - 1} are reordered among themselves")
    q, j, s = row // 8, row % 8 // 2, row % 2
    return 8 * j + 2 * q + s if reordered else row


def thread_of(place: int) -> int:
    """Which thread of a quad holds this column of an fp32 wgmma output: columns 8 j + 2 q and 8 j + 2 q + 1 are q's."""
    return place % 8 // 2


def results_of(thread: int, reordered: bool) -> list[int]:
    """The SwiGLU results (of 16) that a thread can compute alone: those whose gate and up it holds."""
    return [r for r in range(ROWS // 2)
            if {thread_of(place_of(row, reordered)) for row in (2 * r, 2 * r + 1)} == {thread}]


def holders_figure() -> go.Figure:
    """Which thread holds which result, with the weight rows in order and reordered."""
    orders = {"rows as stored": False, "rows reordered": True}
    threads = [[next(q for q in range(QUAD) if r in results_of(q, how)) for r in range(ROWS // 2)]
               for how in orders.values()]
    colours = (style.BLUE, style.RED, style.GREEN, style.OCHRE)
    scale = [[(n + up) / QUAD, colour] for n, colour in enumerate(colours) for up in (0, 1)]
    fig = go.Figure(go.Heatmap(
        z=threads, x=list(range(ROWS // 2)), y=list(orders), text=threads, texttemplate="%{text}", xgap=2, ygap=6,
        colorscale=scale, zmin=-0.5, zmax=QUAD - 0.5, showscale=False, textfont={"color": "white", "size": 14},
        hovertemplate="result %{x}: thread %{z}<extra></extra>"))
    fig.update_xaxes(title_text="result (a gate and an up)", dtick=1, showgrid=False)
    fig.update_yaxes(autorange="reversed", showgrid=False, title_text="")
    return style.finish(fig, "Reordered, a thread's four results are one 32-bit word of e4m3", "modelled",
                        "number and colour: thread of a quad; 16 of a tile's 128 results, one row", height=270)


def requantise_by_tile(gate_up: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU and e4m3 with one scale per row and tile, each tile of `columns` gate/up columns on its own.

    gate_up: [R, 2 I] fp32. Returns q [R, I] uint8 (e4m3 bits) and scale [R, tiles] fp32.
    """
    parts = [quantise_groups(swiglu(part), columns // 2) for part in gate_up.split(columns, dim=1)]
    return torch.cat([q.view(torch.uint8) for q, _ in parts], dim=1), torch.cat([s for _, s in parts], dim=1)


def traffic(rows: int, inter: int) -> dict[str, int]:
    """Bytes between the two GEMMs, written and read, without a GEMM's own reads: separate kernel against fused.

    The separate SwiGLU reads what the first GEMM stored as bf16 and writes e4m3; fused, only the e4m3 is written.
    """
    out = rows * inter + 4 * rows * -(-inter // 128)
    return {"separate": 2 * (2 * rows * 2 * inter) + out, "fused": out}
