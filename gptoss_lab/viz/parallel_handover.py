"""From prefill to decode: which rows of which layers travel, by whom, and how long that takes beside the prefill."""
from __future__ import annotations

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import decode_bound, prefill_bound
from gptoss_lab.cost.hardware import H200
from gptoss_lab.engine.disaggregation_routes import Pair, handover_bytes
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def moved_rows(config: ModelConfig, length: int) -> list[tuple[int, int]]:
    """(first, one past the last) position that travels, for each layer."""
    window = max(0, length - config.sliding_window + 1)
    return [(window if config.is_sliding(n) else 0, length) for n in range(config.num_layers)]


def pages_figure(config: ModelConfig, length: int) -> go.Figure:
    """Layers against positions, to scale: what travels is filled."""
    fig = go.Figure()
    for n, (start, stop) in enumerate(moved_rows(config, length)):
        sliding = config.is_sliding(n)
        fig.add_bar(x=[stop - start], base=[start], y=[n], orientation="h", showlegend=n < 2, width=0.85,
                    name="sliding: the window" if sliding else "full: every position",
                    marker_color=style.OCHRE if sliding else style.BLUE,
                    hovertemplate=f"layer {n}: positions {start}–{stop - 1}<extra></extra>")
    fig.update_xaxes(title_text="position in the prompt", range=[0, length], showgrid=False)
    fig.update_yaxes(title_text="layer", autorange="reversed", showgrid=False)
    size = handover_bytes(config, length)
    every = 2 * config.kv_size * 2 * config.num_layers * length
    return style.finish(fig, f"{size / 1e6:.1f} MB travel, {100 * size / every:.0f} % of what all layers have written",
                        "modelled", f"{config.name}, {length:,} tokens, bf16, drawn to scale", barmode="overlay",
                        height=460, legend={"y": -0.2})


def times(config: ModelConfig, length: int, gb_per_s: float = 250.0) -> dict[str, float]:
    """Seconds, modelled: reading the prompt on one GPU, sending it alone at two rates, and one decode step after it."""
    size = handover_bytes(config, length)
    return {"prefill (bound)": prefill_bound(config, length).seconds,
            f"hand-over at {gb_per_s:g} GB/s": size / (1e9 * gb_per_s),
            "hand-over at 450 GB/s": size / H200.link_bytes_per_second,
            "last chunk's rows, 1/16": size / 16 / (1e9 * gb_per_s),
            "a decode step (bound)": decode_bound(config, length + 1).seconds}


def times_figure(config: ModelConfig, length: int, gb_per_s: float = 250.0) -> go.Figure:
    """The same as bars on one axis of time."""
    found = times(config, length, gb_per_s)
    colours = (style.BLUE, style.OCHRE, style.OCHRE, style.GREEN, style.PURPLE)
    fig = go.Figure(go.Bar(x=[1e3 * s for s in found.values()], y=list(found), orientation="h",
                           marker_color=list(colours), text=[f"{1e3 * s:.2f} ms" for s in found.values()],
                           textposition="outside", cliponaxis=False, hoverinfo="skip"))
    fig.update_xaxes(title_text="ms", range=[0, 1.15e3 * max(found.values())])
    fig.update_yaxes(autorange="reversed", showgrid=False)
    share = found[f"hand-over at {gb_per_s:g} GB/s"] / found["prefill (bound)"]
    title = f"After the prompt the hand-over adds {100 * share:.1f} %; sent while reading, only its end waits"
    return style.finish(fig, title, "modelled", f"{config.name}, {length:,} tokens; datasheet bounds of one H200",
                        height=330, showlegend=False)


def routes_table(config: ModelConfig, pair: Pair) -> Table:
    """Who sends which key/value heads of the first sequence to whom."""
    lines = [[f"prefill rank {r.sender}", f"decode rank {r.receiver - pair.prefill.world}",
              f"{r.heads.start}–{r.heads.stop - 1}"] for r in pair.routes(config, 0)]
    return table(lines, ["from", "to", "key/value heads"])
