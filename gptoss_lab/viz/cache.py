"""Bytes of one sequence's KV cache: what the window saves.

The count is `gptoss_lab.capabilities.cache_bytes`: sliding layers hold at most their window, full layers every token.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from gptoss_lab.capabilities import cache_bytes
from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style


def without_window(config: ModelConfig, tokens: int) -> int:
    """Bytes if every layer kept every token: keys and values, 2 bytes each."""
    return 2 * 2 * config.kv_size * config.num_layers * tokens


def figure(configs: Sequence[ModelConfig]) -> go.Figure:
    """Cache bytes against tokens, as stored and as it would be without the window."""
    fig = go.Figure()
    for config, colour in zip(configs, style.PALETTE, strict=False):
        tokens = [0, config.sliding_window, *range(8192, config.max_position_embeddings + 1, 8192)]
        short = config.name.removeprefix("gpt-oss-")
        kept = [cache_bytes(config, t) / 2**30 for t in tokens]
        every = [without_window(config, t) / 2**30 for t in tokens]
        fig.add_scatter(x=tokens, y=every, name=f"{short}, every layer keeps all", mode="lines",
                        line={"color": colour, "dash": "dot"})
        fig.add_scatter(x=tokens, y=kept, name=f"{short}, window layers keep {config.sliding_window}",
                        line={"color": colour}, mode="lines")
    last = configs[-1]
    longest = last.max_position_embeddings
    fig.update_xaxes(title_text="tokens of the sequence", dtick=16384, tickformat=",")
    fig.update_yaxes(title_text="keys and values (bf16), GiB")
    share = cache_bytes(last, longest) / without_window(last, longest)
    return style.finish(
        fig, f"At {longest:,} tokens the window leaves {100 * share:.0f} % of the cache", "modelled",
        "one sequence; from the configuration alone", height=460, legend={"y": -0.2},
    )
