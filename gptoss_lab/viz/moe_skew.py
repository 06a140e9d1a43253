"""Skewed routing: a few experts get most rows. What that does to tiles, to bytes, and to ranks that hold experts.

The skew is the benchmark's: expert number r (from 1) has its logit lowered by skew * ln r. The numbers are counts of
one random routing, computed here.
"""
from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import torch

from gptoss_kernels.moe.layout import padding_share
from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style
from gptoss_lab.viz.moe_rows import expert_sizes, sampled_ids
from gptoss_lab.viz.table import Table, table

SKEWS = (0.0, 0.5, 1.0, 2.0)


def busiest_rank(sizes: Sequence[int], ranks: int) -> float:
    """Rows of the fullest of `ranks` equal ranges of experts, over the mean: how long the others wait for it."""
    if ranks < 1 or len(sizes) % ranks or not sum(sizes):
        raise ValueError(f"busiest_rank: {len(sizes)} experts with {sum(sizes)} rows over {ranks} ranks; equal ranges "
                         "of experts and at least one row are needed")
    width = len(sizes) // ranks
    loads = [sum(sizes[n * width:(n + 1) * width]) for n in range(ranks)]
    return max(loads) * ranks / sum(sizes)


def skew_table(config: ModelConfig, tokens: int = 8192, batch: int = 32, ranks: int = 8,
               skews: Sequence[float] = SKEWS) -> Table:
    """One line per skew. Popular experts are strewn over the ranks at random, the same way for every skew."""
    e, k = config.num_experts, config.experts_per_token
    strewn = torch.randperm(e, generator=torch.Generator().manual_seed(0)).tolist()
    lines = []
    for skew in skews:
        sizes = expert_sizes(sampled_ids(tokens, e, k, skew), e)
        few = expert_sizes(sampled_ids(batch, e, k, skew), e)
        lines.append([f"{skew:g}", f"{100 * max(sizes) / sum(sizes):.1f}", f"{min(sizes):,}",
                      f"{100 * padding_share(sizes, 128):.1f}", sum(size > 0 for size in few),
                      f"{busiest_rank([sizes[n] for n in strewn], ranks):.2f}", "live"])
    return table(lines, ["skew", "largest expert, % of rows", "rows of the smallest", "padding to 128, %",
                         f"experts hit at batch {batch}", f"EP{ranks}: busiest rank / mean", "origin"])


def figure(config: ModelConfig, tokens: int = 8192, skews: Sequence[float] = SKEWS) -> go.Figure:
    """Rows of every expert, largest first; a line ends where the experts without rows begin."""
    fig = go.Figure()
    e, k = config.num_experts, config.experts_per_token
    largest = 0
    for skew, colour in zip(skews, style.PALETTE, strict=False):
        sizes = sorted(expert_sizes(sampled_ids(tokens, e, k, skew), e), reverse=True)
        largest = max(largest, sizes[0])
        shown = [size or None for size in sizes]                        # no rows, no place on a log axis
        fig.add_scatter(x=list(range(1, e + 1)), y=shown, mode="lines", name=f"skew {skew:g}", line={"color": colour},
                        hovertemplate="rank %{x}: %{y} rows<extra>skew " + f"{skew:g}</extra>")
    fig.add_scatter(x=[1, e], y=[tokens * k / e] * 2, mode="lines", name="even spread", hoverinfo="skip",
                    line={"dash": "dot", "color": style.MUTED})
    fig.update_xaxes(title_text="expert, by number of rows")
    fig.update_yaxes(type="log", title_text="rows", tickvals=[1, 10, 100, 1000, 10000],
                     ticktext=["1", "10", "100", "1,000", "10,000"])
    return style.finish(
        fig, f"With skew {skews[-1]:g} one expert gets {largest:,} of {tokens * k:,} rows; even: {tokens * k // e:,}",
        "live", f"{tokens:,} random tokens, {k} of {e} experts each")
