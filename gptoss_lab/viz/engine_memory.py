"""What a sequence holds in the KV cache: every position everywhere, or the window only where a layer sees no more."""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import kv_bytes
from gptoss_lab.engine.memory import positions_in
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def bytes_table(config: ModelConfig, lengths: Sequence[int]) -> Table:
    """Bytes of one sequence in bf16: with rings, without, and e4m3 with rings."""
    rows = [[n, kv_bytes(config, n), kv_bytes(config, n, window_ring=False), kv_bytes(config, n, "fp8")]
            for n in lengths]
    return table(rows, ["tokens", "rings, bf16", "every position, bf16", "rings, e4m3"])


def bytes_figure(config: ModelConfig) -> go.Figure:
    """GB of one sequence against its length."""
    lengths = [0, config.sliding_window, *range(4096, config.max_position_embeddings + 1, 4096)]
    fig = go.Figure()
    ways = (("every position, bf16", style.GREY, False, "bf16"), ("rings, bf16", style.BLUE, True, "bf16"),
            ("rings, e4m3", style.TEAL, True, "fp8"))
    for name, colour, ring, form in ways:
        fig.add_scatter(x=lengths, y=[kv_bytes(config, n, form, ring) / 1e9 for n in lengths], mode="lines", name=name,
                        line={"color": colour})
    fig.update_xaxes(title_text="tokens of the sequence")
    fig.update_yaxes(title_text="GB")
    ends = [kv_bytes(config, lengths[-1], window_ring=ring) / 1e9 for ring in (True, False)]
    return style.finish(fig, f"A sequence of {lengths[-1]:,} tokens holds {ends[0]:.2f} GB with rings, "
                             f"not {ends[1]:.2f}", "modelled", f"{config.name}; exact counts of the rows kept")


def room_table(config: ModelConfig, free_gb: Sequence[float], sequences: int) -> Table:
    """How many positions a pool has in so many GB, for so many sequences at once; pages of 64."""
    rows = [[f"{gb:g}", positions_in(int(gb * 1e9), config, sequences),
             positions_in(int(gb * 1e9), config, sequences, value_bytes=1)] for gb in free_gb]
    return table(rows, ["GB for the cache", "positions, bf16", "positions, e4m3"])
