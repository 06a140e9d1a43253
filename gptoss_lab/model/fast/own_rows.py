"""A prompt's layers where each rank keeps its own rows of the residual stream (parallel/own_rows.py).

    QKV product         of all rows in e4m3, as the last sum handed them out
    rope, attention     of this rank's heads, all rows
    output projection   this rank's part of all rows
    sum                 own rows; norm and e4m3, handed out                                 1 launch
    router              own rows; the choice handed out                                     2
    experts             rows placed (count, place, copy), 2 products, combine: a part       6
    sum                 own rows; norm and e4m3 for the next layer, handed out              1

What every rank does for all rows otherwise, norm, quantisation and routing, is done once here, and three quarters of
the bytes cross the link between two ranks. It pays where a step has many rows; a decode step takes `RankForward`'s way.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn.functional import embedding

from gptoss_kernels.quant import Quantised
from gptoss_kernels.registry import choose
from gptoss_lab.model.fast.forward import Forward, Observe, flat
from gptoss_lab.model.fast.step import AnyStep
from gptoss_lab.model.fast.weights import FastLayer, Projection
from gptoss_lab.parallel.residual import ResidualSum

LEAST_ROWS = 1024       # fewer are soon summed, and each rank would have too few for its kernels


def obstacle(forward: Forward, sums: ResidualSum) -> str | None:
    """Why no step of `forward` keeps own rows, in one line; None if those with enough rows do. The same everywhere."""
    weights, backend = forward.weights, forward.operations.moe_layer.backend
    if forward.whole_heads:
        return "every rank has all heads; no sum follows attention"
    if weights.projections != "fp8":
        return f"projections are {weights.projections!r}; rows are handed out in e4m3"
    if weights.experts != "fp8" or backend != "cuda":
        return f"experts are {weights.experts!r} by {backend!r}; 'fp8' by 'cuda' take rows in e4m3"
    if sums.form(LEAST_ROWS) == "plain":
        return f"no kernel sums {LEAST_ROWS} rows: {sums.reason}"
    return None


class OwnRowsForward(Forward):
    """The prefill steps of a rank that has all tokens of its only data-parallel group, and part of the heads.

    forward: whose weights, pool, kernels and tables these are. sums: the group's; its buffers are shared. Made by all
    ranks together, and a step is taken by all of them.
    """

    whole_heads = False

    def __init__(self, forward: Forward, sums: ResidualSum) -> None:
        vars(self).update(vars(forward))                                         # nothing is made twice
        self._sums, self._own = sums, sums.own_rows(self.weights.config.experts_per_token)
        needs = {"device": self.weights.device, "dtype": self.weights.dtype, "expert_form": self.weights.experts}
        self._choose, self._routed = (choose(operation, self.operations.moe_layer.backend, **needs).function
                                      for operation in ("choose_experts", "moe"))
        self._rows: torch.Tensor | Quantised | None = None

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows, which all ranks have, is one of these."""
        return LEAST_ROWS <= rows <= self._sums.rows

    def prefill(
        self, ids: torch.Tensor, lengths: Sequence[int], step: AnyStep, logits: str, observe: Observe | None = None
    ) -> torch.Tensor | None:
        """As `RankForward.prefill`, of a step that is planned. observe("moe_input", layer, own rows)."""
        own = self.hidden(ids, step, observe)
        if logits == "none":
            return None
        ends = None if logits == "all" else [end - 1 for end in accumulate(lengths)]
        return self._own.gather(own, ends, len(ids), "rows of the head")

    def hidden(self, ids: torch.Tensor, step: AnyStep, observe: Observe | None = None) -> torch.Tensor:
        """ids [T] int64 -> own rows [own, H] of what enters the final norm."""
        layers, eps, mine = self.weights.layers, self.weights.config.rms_norm_eps, self._own.own(len(ids))
        self._rows = embedding(ids, self.weights.embedding)                      # [T, H]; then in e4m3
        own = self._rows[mine.start : mine.stop]
        next_norms = [*(layer.attention_norm for layer in layers[1:]), None]
        for n, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            part = self._attention(own, layer, n, step)                          # [T, H], of this rank's heads
            own, self._rows = self._own.sum(part, own, "attention", layer.moe.norm, eps, handed_out=True)
            if observe is not None:
                observe("moe_input", n, own)
            part = self._experts(own, layer, n, step)                            # [T, H], of this rank's experts
            own, self._rows = self._own.sum(part, own, "combine", next_norm, eps)
        return own

    def _qkv(self, x: torch.Tensor, layer: FastLayer, step: AnyStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows; x: own ones."""
        norm = None if isinstance(self._rows, Quantised) else layer.attention_norm
        return self._fp8(self._rows, layer.qkv.weight, layer.qkv.scale_inv, layer.qkv.bias, step.rows, norm,
                         self.weights.config.rms_norm_eps, dtype=x.dtype), x

    def _join(
        self, base: torch.Tensor, heads: torch.Tensor | Quantised, out: Projection, step: AnyStep
    ) -> torch.Tensor:
        """The output projection's part of the sum, all rows, as `Forward._join` has heads; base: own rows."""
        return self._fp8(flat(heads), out.weight, out.scale_inv, out.bias, step.rows,
                         out=self._sums.room(step.rows.tokens), dtype=base.dtype)

    def _experts(self, x: torch.Tensor, layer: FastLayer, n: int, step: AnyStep) -> torch.Tensor:
        """Own rows x choose their experts; the part of the experts here, all rows."""
        moe, tokens = layer.moe, step.rows.tokens
        ids, weights = self._own.hand_out(*self._choose(x, moe), tokens, "dispatch")
        return self._routed(self._rows, ids, weights, moe.gate_up, moe.gate_up_bias, moe.down, moe.down_bias,
                            alpha=moe.alpha, limit=moe.limit, first_expert=moe.first_expert, dtype=x.dtype,
                            out=self._sums.room(tokens))
