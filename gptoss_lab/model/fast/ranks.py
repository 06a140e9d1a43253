"""The layers of the fast forward where several ranks hold the model between them.

What differs from one rank is where sums end. With the heads cut (TP) the output projection gives a part of a sum, and
so do the experts: both end in a `ResidualSum`, one kernel that adds all ranks' parts and the residual, and for a prompt
norms what the next QKV product takes; of a long prompt each rank sums rows of its own alone (own_rows.py). Where ranks
have different tokens (a split prompt, data parallel groups) the experts' input is gathered from all of them, routed
again here for the experts that are here, and the parts go back by a reduce-scatter.

Gathered, not sent to chosen ranks: with four experts a token and two ranks 94 % of the tokens are needed on the other
one anyway, and a choice would have to be known on the host before it could be sent. At eight ranks a choice would move
42 % of the bytes. The router's work is repeated on every rank: 0.7 MFLOP a token beside some 100 of its experts.

What is lost: padding rows of other data-parallel groups are not known here, so they reach experts (their results go
nowhere); and what is gathered is bf16, where e4m3 rows would be half the bytes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import linear

from gptoss_kernels.projection import MOST_TOKENS
from gptoss_kernels.quant import Quantised
from gptoss_lab.model.fast.forward import Forward, Observe, flat
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.fast.own_rows import OwnRowsForward, obstacle
from gptoss_lab.model.fast.split import SplitKind, own_keys, split_kinds
from gptoss_lab.model.fast.step import AnyStep, PrefillStep, Step
from gptoss_lab.model.fast.weights import FastLayer, FastWeights, Projection
from gptoss_lab.model.paged import PagedCache, PagePool
from gptoss_lab.parallel.collectives import PlanCollectives
from gptoss_lab.parallel.sequence import SequenceSplit


@dataclass(frozen=True)
class RankStep(Step):
    """A step whose experts see the rows of several ranks. counts: rows of each peer. split: of a split prompt."""

    counts: tuple[int, ...] = ()
    split: SequenceSplit | None = None


def with_counts(step: AnyStep, counts: tuple[int, ...]) -> RankStep:
    """A step of one rank among peers that have `counts` rows."""
    return RankStep(**{field.name: getattr(step, field.name) for field in fields(Step)}, counts=counts)


class RankForward(Forward):
    """One rank's part of `Forward`.

    ranks: its plan's collectives. rows: the most that a fused sum takes (residual.py). Made by all ranks together.
    ValueError for a split sequence with several data-parallel groups.
    """

    def __init__(
        self, weights: FastWeights, pool: PagePool, operations: FastOperations, ranks: PlanCollectives, rows: int
    ) -> None:
        super().__init__(weights, pool, operations)
        plan, config = ranks.groups.plan, weights.config
        if plan.sequence_split and plan.dp > 1:
            raise ValueError(f"{plan}: the fast forward splits a prompt over the ranks of one data-parallel group; the "
                             "plain one does over several")
        self.ranks, self.whole_heads, self.groups = ranks, plan.head_ways == 1, plan.dp
        self.sum = ranks.residual_sum(rows, weights.dtype, weights.device,
                                      calls=config.num_layers * (1 if self.whole_heads else 2))
        why_not = "several data-parallel groups have other rows" if plan.dp > 1 else obstacle(self, self.sum)
        self.own_rows = None if why_not else OwnRowsForward(self, self.sum)

    def prefill(
        self, ids: torch.Tensor, lengths: Sequence[int], caches: Sequence[PagedCache], logits: str,
        observe: Observe | None = None,
    ) -> torch.Tensor | None:
        """The rows [B or T, H] from which the logits of a step that is no decode are read; None for logits "none".

        ids: [T] int64, lengths[b] new tokens of each sequence, none where other groups alone have some.
        """
        split = self.ranks.start(lengths, True, self.weights.device)
        if split is not None:
            own = len(split.rows)
            step = RankStep(*split_kinds(self.pool, caches, split, self.heads, self.operations), self.rows(own), None,
                            tuple(split.counts), split)
            x = self.hidden(ids.index_select(0, split.rows), step, observe)
            return None if logits == "none" else split.last(x) if logits == "last" else split.all(x)
        step: AnyStep = Step(ids.to(torch.int32), None, None)                    # without tokens nothing attends
        if lengths:
            step = PrefillStep(self.pool, caches, lengths, self.heads, self.operations, self.rows(sum(lengths)))
        if self.groups > 1:
            step = with_counts(step, self.ranks.counts)
        if self.own_rows is not None and self.own_rows.takes(len(ids)):
            return self.own_rows.prefill(ids, lengths, step, logits, observe)
        x = self.hidden(ids, step, observe)
        if logits == "none":
            return None
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        return x if logits == "all" else x.index_select(0, ends.to(x.device, non_blocking=True))

    def agree(self, decode: bool, rows: int) -> int | None:
        """Whether this step is one of decode in all data-parallel groups: then the most rows of any, else None.

        decode: whether it is here; a group without tokens goes along with the others.
        """
        if self.groups == 1:
            return rows if decode else None
        mine = torch.tensor([[int(decode or not rows), rows]], device=self.weights.device)
        found = self.ranks.groups.data.all_gather(mine, [1] * self.groups, "kind of step").tolist()
        return max(count for _, count in found) if all(able for able, _ in found) else None

    def hidden(self, ids: torch.Tensor, step: AnyStep, observe: Observe | None = None) -> torch.Tensor:
        """As `Forward.hidden`. Of a split prompt ids are the own rows'."""
        if self.groups > 1 and not isinstance(step, RankStep):                   # decode: as many rows everywhere
            step = with_counts(step, (ids.shape[0],) * self.groups)
        return super().hidden(ids, step, observe)

    def head(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, H] -> logits [R, V], or of this rank's columns if the ranks' sampler works on those; normed rows."""
        if not x.shape[0]:
            return x.new_empty(0, self.weights.unembedding.shape[0]), x
        logits, normed = super().head(x)
        return self.ranks.gather_logits(logits), normed

    def _attention(self, x: torch.Tensor, layer: FastLayer, n: int, step: AnyStep) -> torch.Tensor:
        """x [T, H] -> x + attention [T, H]; T may be 0, and then only exchanges take place."""
        if isinstance(step, RankStep) and step.split is not None:
            return self._split_attention(x, layer, n, step)
        return super()._attention(x, layer, n, step) if x.shape[0] else x

    def _split_attention(self, x: torch.Tensor, layer: FastLayer, n: int, step: RankStep) -> torch.Tensor:
        """Own rows x [own, H] -> x + attention, with the keys and values of the others as far as they are seen."""
        kind, pages = step.kind(layer.sliding), (self.pool.keys[n], self.pool.values[n])
        scales = None if self.pool.key_scales is None else (self.pool.key_scales[n], self.pool.value_scales[n])
        own, q, base = own_keys(self.pool, x), None, x
        if x.shape[0]:
            qkv, base = self._qkv(x, layer, step)
            q = self._rope(qkv, step.positions, self.cos, self.sin, *pages, kind.slots, heads=self.heads,
                           scales=scales, keys=own[0], values=own[1])            # [own, Hq, D]
        out = self._attend(kind, q, own, pages, layer, step, scales)
        return x if out is None else self._join(base, out, layer.out, step)

    def _attend(
        self, kind: SplitKind, q: torch.Tensor | None, own: tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, torch.Tensor], layer: FastLayer, step: RankStep,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor | Quantised | None:
        """Move keys and values, keep them, attend with the own queries (None: there are none)."""
        whole = step.split.move(torch.cat(own, dim=1), kind.window, "keys and values")               # [T, 2 Hkv, D]
        moved = whole.chunk(2, dim=1)
        seen = kind.seen(moved, pages, scales)
        kind.keep(moved, pages, scales)
        if q is None:
            return None
        room = self._room(len(q), layer.out.weight.shape[1], step)
        if seen is None:
            return kind.plan.run(q, *pages, layer.sinks, out=room, scales=scales)
        return kind.plan.run(q, *seen, layer.sinks, out=room)

    def _qkv(self, x: torch.Tensor, layer: FastLayer, step: AnyStep) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Forward._qkv`; the norm is there already if the last sum made it."""
        normed = self._made_ahead(x)
        if normed is not None:
            return linear(normed, layer.qkv.weight, layer.qkv.bias), x
        return super()._qkv(x, layer, step)

    def _join(
        self, base: torch.Tensor, heads: torch.Tensor | Quantised, out: Projection, step: AnyStep
    ) -> torch.Tensor:
        """base [T, H] + the sum over the ranks of the output projections of their heads, as `Forward._join` has them.
        """
        if self.whole_heads:
            return super()._join(base, heads, out, step)
        heads, tokens = flat(heads), base.shape[0]
        if tokens <= MOST_TOKENS:
            part = self._few(heads, out.weight, out.bias, scale_inv=out.scale_inv)
        elif out.scale_inv is not None:
            part = self._fp8(heads, out.weight, out.scale_inv, out.bias, step.rows, out=self.sum.room(tokens),
                             dtype=base.dtype)
        else:
            room = self.sum.room(tokens)
            part = (linear(heads, out.weight, out.bias) if room is None
                    else torch.addmm(out.bias, heads, out.weight.t(), out=room))
        return self.sum(part, base, "attention")[0]

    def _experts(self, x: torch.Tensor, layer: FastLayer, n: int, step: AnyStep) -> torch.Tensor:
        """x [T, H] -> x + the sum over the ranks of their experts' parts [T, H]."""
        if isinstance(step, RankStep):
            return self._gathered_experts(x, layer, step)
        part = self._moe(x, layer.moe, residual=False, num_tokens=step.live, out=self.sum.room(x.shape[0]))
        total, normed = self.sum(part, x, "combine", self._sum_norm(n, len(x)), self.weights.config.rms_norm_eps)
        self._ahead = None if normed is None else (total, normed)
        return total

    def _gathered_experts(self, x: torch.Tensor, layer: FastLayer, step: RankStep) -> torch.Tensor:
        """The same where the peers have other rows, `step.counts` of them each."""
        peers, counts = self.ranks.peers, step.counts
        rows = peers.all_gather(x, counts, "dispatch")                           # [T', H]
        if not rows.shape[0]:
            return x
        part = peers.reduce_scatter(self._moe(rows, layer.moe, residual=False), counts, "combine")
        return self.sum(part, x, "combine")[0] if self.ranks.copies.size > 1 else x + part

    def _sum_norm(self, n: int, rows: int) -> torch.Tensor | None:
        """The weight of the norm that follows layer n's sum, where a kernel of its own would do it otherwise."""
        in_product = self.weights.projections != "dense" or rows <= MOST_TOKENS
        if in_product or self.whole_heads or n + 1 == len(self.weights.layers):
            return None
        return self.weights.layers[n + 1].attention_norm
