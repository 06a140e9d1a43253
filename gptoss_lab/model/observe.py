"""Looking inside a forward pass without changing it.

`Transformer.forward(..., observe=f)` calls f(what, layer, value) at a few places. With observe=None nothing is
computed for it. What is reported, T being the new tokens of the step:

    "hidden_norm"     [T] fp32          root mean square of the residual stream that enters the layer
                                        (layer = number of layers: what enters the final norm)
    "sink_mass"       [T, Hq] fp32      probability that each head gives to its sink: exp(sink - lse_with_sink)
    "router_logits"   [T, E]            as routed, in the router's dtype
    "router_ids"      [T, k] int64      chosen experts, best first
    "router_weights"  [T, k]            their weights
"""
from __future__ import annotations

from collections.abc import Callable

import torch

Observe = Callable[[str, int, torch.Tensor], None]


class Recorder:
    """An `observe` that keeps a copy of everything on the CPU: pass it, run one or more steps, then read it.

    only: names to keep (default all).
    """

    def __init__(self, *only: str) -> None:
        self.only = frozenset(only)
        self.values: dict[str, dict[int, list[torch.Tensor]]] = {}

    def __call__(self, what: str, layer: int, value: torch.Tensor) -> None:
        if not self.only or what in self.only:
            self.values.setdefault(what, {}).setdefault(layer, []).append(value.detach().cpu().clone())

    def stacked(self, what: str) -> torch.Tensor:
        """[layers, T, ...]: one observation of every layer, the steps one after the other along T."""
        if what not in self.values:
            raise KeyError(f"nothing was recorded as {what!r}; there is {', '.join(sorted(self.values)) or 'nothing'}")
        layers = self.values[what]
        return torch.stack([torch.cat(layers[n]) for n in sorted(layers)])
