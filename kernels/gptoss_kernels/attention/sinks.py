"""The sink outside a kernel: add it to attention that was computed without one."""
from __future__ import annotations

import torch


def rescale_by_sink(out: torch.Tensor, lse_without_sink: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Turn sink-less attention into attention with sinks, in place: out *= 1 / (1 + exp(sink - lse)).

    out: [rows, heads, D]. lse_without_sink: [rows, heads] fp32, natural log; -inf for a row that saw no key (whose out
    must be 0). sinks: [heads]. Exact but for one more rounding of `out` to its dtype. Returns out.
    """
    weight = torch.sigmoid(lse_without_sink.float() - sinks.float())
    weight = torch.where(sinks.float() == -torch.inf, 1.0, weight)      # -inf - (-inf) is NaN; no sink means no change
    return out.mul_(weight[..., None])


def add_sink_to_lse(lse_without_sink: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """log(exp(lse) + exp(sink)): [rows, heads] and [heads] to [rows, heads], natural log."""
    return torch.logaddexp(lse_without_sink, sinks.to(lse_without_sink.dtype).expand_as(lse_without_sink))
