"""What does not fit: 2880 in blocks of 128, and an expert's rows in tiles of 64 or 128.

Two kinds of waste. The widths are fixed: 2880 = 22.5 blocks of 128, whatever the batch. The rows are random: with even
routing an expert gets a binomial number of them, and its last tile is on average half empty. The expectation of the
padded rows is a finite sum, done here exactly.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
import torch

from gptoss_kernels.moe.study import block_waste
from gptoss_lab.config import ModelConfig
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

TOKENS = tuple(2**n for n in range(16))


def expected_padding(tokens: int, num_experts: int, experts_per_token: int, align: int) -> float:
    """Expected padded rows over real rows, minus one, if every token picks its experts evenly and independently.

    An expert's rows are binomial (tokens, k / E); each count n takes ceil(n / align) * align rows.
    """
    if min(tokens, experts_per_token, align) < 1 or experts_per_token > num_experts:
        raise ValueError(f"expected_padding: {tokens} tokens, {experts_per_token} of {num_experts} experts, tiles of "
                         f"{align}; all at least 1 and no more chosen than there are")
    n = torch.arange(tokens + 1, dtype=torch.float64)
    share = torch.tensor(experts_per_token / num_experts, dtype=torch.float64)
    chance = torch.distributions.Binomial(tokens, probs=share).log_prob(n).exp()
    padded = float((chance * torch.ceil(n / align) * align).sum())
    return num_experts * padded / (tokens * experts_per_token) - 1


def figure(configs: Sequence[ModelConfig], aligns: Sequence[int] = (128, 64, 16)) -> go.Figure:
    """Padding in per cent of the real rows over the tokens of a pass."""
    fig = go.Figure()
    dashes = ("solid", "dash", "dot")
    for config, colour in zip(configs, style.PALETTE, strict=False):
        for align, dash in zip(aligns, dashes, strict=True):
            share = [100 * expected_padding(t, config.num_experts, config.experts_per_token, align) for t in TOKENS]
            fig.add_scatter(x=list(TOKENS), y=share, mode="lines", line={"color": colour, "dash": dash},
                            name=f"{config.num_experts} experts, tiles of {align}",
                            hovertemplate="%{x} tokens: %{y:.3g} %<extra>%{fullData.name}</extra>")
    fig.update_xaxes(type="log", title_text="tokens of the pass", tickvals=list(TOKENS[::3]),
                     ticktext=[f"{t:,}" for t in TOKENS[::3]])
    fig.update_yaxes(type="log", title_text="padding, % of the real rows", tickvals=[1, 10, 100, 1000, 10000],
                     ticktext=["1", "10", "100", "1,000", "10,000"])
    big = configs[-1]
    at = [100 * expected_padding(8192, big.num_experts, big.experts_per_token, a) for a in aligns[:2]]
    return style.finish(
        fig, f"At 8,192 tokens and {big.num_experts} experts tiles of {aligns[0]} pad {at[0]:.0f} %, "
             f"tiles of {aligns[1]} {at[1]:.0f} %",
        "modelled", "expectation for even, independent routing, 4 experts per token", height=460, legend={"y": -0.22})


def fit_table(cuts: Iterable[tuple[str, int, int]]) -> Table:
    """How whole blocks fit an axis. cuts: (what is cut, its size, the block)."""
    return table([[what, size, block, f"{size / block:g}", -(-size // block), f"{100 * block_waste(size, block):.2f}"]
                  for what, size, block in cuts],
                 ["axis", "size", "block", "blocks", "whole blocks", "extra work, %"])


def largest_even_block(size: int, most: int, step: int = 64) -> int:
    """The largest block up to `most`, a multiple of `step`, that divides `size`: a GEMM's columns without waste."""
    for block in range(most // step * step, 0, -step):
        if size % block == 0:
            return block
    raise ValueError(f"largest_even_block: no multiple of {step} up to {most} divides {size}")
