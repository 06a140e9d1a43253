"""StreamingLLM's sinks and gpt-oss's: the same need, met by real tokens or by a learned number.

A softmax has to put its weight somewhere. A model without learned sinks puts what it does not need on the first
tokens, which every query can see. A sliding window then drops them, and their weight lands on keys that did not ask
for it. StreamingLLM keeps the first tokens in the cache for good. A learned sink is a logit and nothing else: it is
never in the cache, cannot be dropped, and adds no value to the output.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch

from gptoss_lab.viz import style

FIRST = 4
"""Tokens that StreamingLLM keeps at the start."""


@dataclass(frozen=True)
class Shares:
    """Where a query's attention goes, as parts of 1: to the sink, to the first tokens, to the window, to the rest."""

    name: str
    sink: float
    first: float
    window: float
    middle: float


def example_logits(keys: int, pull: float, seed: int = 0) -> torch.Tensor:
    """Gaussian logits, [keys] fp64, with `pull` for the first token, as models trained without sinks make it."""
    logits = torch.randn(keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[0] = pull
    return logits


def shares(logits: torch.Tensor, window: int, sink: float) -> list[Shares]:
    """Where the attention goes under four policies. logits: [keys], more than FIRST + window. sink: the learned one.

    ValueError if the window would drop nothing.
    """
    keys = logits.numel()
    if keys <= FIRST + window:
        raise ValueError(f"{keys} keys; more than {FIRST + window} are needed for the window to drop some")
    recent = torch.arange(keys) >= keys - window
    first = torch.arange(keys) < FIRST
    everything = torch.ones(keys, dtype=torch.bool)
    policies = (
        ("all keys", everything, -torch.inf), ("window only", recent, -torch.inf),
        (f"window and first {FIRST} (StreamingLLM)", recent | first, -torch.inf),
        ("window and a learned sink (gpt-oss)", recent, sink),
    )
    return [_share(name, logits, kept, own, first, recent) for name, kept, own in policies]


def _share(
    name: str, logits: torch.Tensor, kept: torch.Tensor, sink: float, first: torch.Tensor, recent: torch.Tensor
) -> Shares:
    seen = logits.masked_fill(~kept, -torch.inf)
    weights = torch.softmax(torch.cat([seen, torch.tensor([sink], dtype=torch.float64)]), dim=0)
    keys = weights[:-1]
    return Shares(name, float(weights[-1]), float(keys[first].sum()), float(keys[recent].sum()),
                  float(keys[~first & ~recent].sum()))


def figure(logits: torch.Tensor, window: int, sink: float) -> go.Figure:
    """The shares of `shares` as stacked bars."""
    rows = shares(logits, window, sink)
    fig = go.Figure()
    parts: Sequence[tuple[str, str, str]] = (
        ("sink", "the learned sink", style.RED), ("first", f"the first {FIRST} tokens", style.OCHRE),
        ("middle", "keys between", style.GREY), ("window", f"the last {window} keys", style.BLUE),
    )
    for key, name, colour in parts:
        values = [100 * getattr(row, key) for row in rows]
        fig.add_bar(y=[row.name for row in rows], x=values, name=name, orientation="h", marker_color=colour,
                    text=[f"{v:.0f} %" if v > 3 else "" for v in values], textposition="inside",
                    insidetextanchor="middle", textfont={"color": "white"}, textangle=0)
    times = rows[1].window / rows[0].window
    fig.update_xaxes(title_text="where the attention of one query goes, %", range=[0, 100])
    fig.update_yaxes(autorange="reversed", title_text="keys that are kept")
    return style.finish(
        fig, f"In a bare window the last {window} keys get {times:.1f} times their weight", "live",
        f"{logits.numel()} Gaussian logits, {float(logits[0]):g} for the first token; learned sink {sink:g}",
        barmode="stack", height=400, legend={"traceorder": "normal"},
    )
