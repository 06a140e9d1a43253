"""The least time of a pass by part, and what fits into a node: the two limits that no engine can argue with; and how
near the recorded steps of both weight formats come to the first."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import Plan, Precision, max_sequences, memory_fit
from gptoss_lab.cost.bounds import decode_bound
from gptoss_lab.cost.estimate import Question, measured
from gptoss_lab.cost.formats import format_table
from gptoss_lab.cost.precision import FP8_EXPERTS, RELEASED, SERVED
from gptoss_lab.cost.sweep import BATCHES, EP_PLANS
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

_SHOWN = {"experts": ("experts_gate_up", "experts_down"), "attention, full": ("attention_full",),
          "attention, window": ("attention_window",), "projections": ("qkv_projection", "output_projection"),
          "head": ("head",)}


def parts_table(question: Question) -> Table:
    """One line per part of a pass: FLOPs, bytes, least time, what limits it, share of the whole."""
    lines = [[row["part"].replace("_", " "), f"{row['flop'] / 1e9:,.1f}",
              f"{(row['weight_bytes'] + row['kv_bytes']) / 1e6:,.1f}", f"{1e3 * row['seconds']:.3f}", row["limited_by"],
              f"{100 * row['share']:.1f}", "modelled"]
             for row in question.bound.table() if row["seconds"] > 0]
    return table(lines, ["part", "GFLOP", "MB", "bound, ms", "limited by", "share, %", "origin"])


def memory_table(configs: Sequence[ModelConfig], tokens: int, plans: Sequence[Plan] = EP_PLANS) -> Table:
    """Weights, room for KV and most sequences of `tokens` tokens per replica, for FP8 and MXFP4 experts."""
    lines = []
    for config in configs:
        for plan in plans:
            cells: list[object] = [config.name, str(plan)]
            for precision in (FP8_EXPERTS, RELEASED):
                fit = memory_fit(config, 0, 0, precision, plan)
                cells += [f"{fit.weight_bytes / 1e9:.1f}", max_sequences(config, tokens, precision, plan)]
            lines.append([*cells, "modelled"])
    return table(lines, ["model", "plan", "FP8, GB per GPU", f"FP8: sequences of {tokens:,}", "MXFP4, GB per GPU",
                         f"MXFP4: sequences of {tokens:,}", "origin"])


def decode_figure(config: ModelConfig, tokens: int, precision: Precision = FP8_EXPERTS) -> go.Figure:
    """Least time of a decode step by part, over the batch, on one GPU; and the tokens per second it allows."""
    limits = {batch: decode_bound(config, tokens, batch, precision) for batch in BATCHES}
    fig = go.Figure()
    for (name, parts), colour in zip(_SHOWN.items(), style.PALETTE, strict=False):
        fig.add_bar(x=[str(batch) for batch in BATCHES], name=name, marker={"color": colour},
                    y=[1e3 * sum(limit[part].seconds for part in parts) for limit in limits.values()],
                    hovertemplate="batch %{x}: %{y:.2f} ms<extra>" + f"{name}</extra>")
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title_text="batch", type="category")
    fig.update_yaxes(title_text="least milliseconds per step")
    one, many = (limits[batch].sequential_seconds for batch in (1, 32))
    return style.finish(fig, f"32 users make a step {many / one:.0f} times as long, not 32 times", "modelled",
                        f"{config.name}, FP8 experts, one GPU, {tokens:,} tokens each; datasheet rates")


def formats_table(
    rows: Iterable[Mapping[str, Any]], config: ModelConfig, tokens: int, batches: Sequence[int] = BATCHES
) -> Table:
    """A decode step with FP8 and with packed MXFP4 experts on one GPU, projections in FP8: the bound (modelled) beside
    the recorded step, one line per batch; empty where no step of that batch was recorded or none fits."""
    rows = list(rows)
    lines = []
    for row in format_table(config, tokens, batches, SERVED):
        bounds = (row.fp8_seconds, row.mxfp4_seconds)
        steps = [measured(Question(config, "decode", tokens, row.batch, precision=replace(SERVED, experts=form)),
                          rows).seconds for form in ("fp8", "mxfp4")]
        both = "" if None in steps else f"{steps[0] / steps[1]:.2f}"
        lines.append([row.batch, f"{row.distinct_experts:.1f}", *(f"{1e3 * value:.2f}" for value in bounds),
                      f"{row.fp8_over_mxfp4:.2f}", *("" if step is None else f"{1e3 * step:.2f}" for step in steps),
                      both])
    return table(lines, ["batch", "experts per layer", "FP8 bound, ms (modelled)", "MXFP4 bound, ms (modelled)",
                         "FP8 / MXFP4, bounds", "FP8, ms (recorded)", "MXFP4, ms (recorded)",
                         "FP8 / MXFP4, recorded"])
