"""Choosing tokens from logits that lie in shards of the vocabulary, without bringing them together.

128 sequences have 103 MB of logits a step. Here a rank looks at its own columns and the ranks exchange a few numbers
a row: for greedy choice each rank's largest logit and its id; for a draw the sum of each rank's weights, then the one
rank in which the uniform number falls finds the token. With top-k or top-p each rank sends its 1024 likeliest tokens,
from which every rank works out the same threshold; a row for which they do not suffice is gathered whole.

The result is that of one rank: greedy exactly, ties by the lowest id; draws up to the rounding of float64 sums, whose
order differs. All ranks return the same tokens.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gptoss_lab.parallel.groups import Group

CANDIDATES = 1024


class VocabularyShards:
    """The columns `rows` of the vocabulary on this rank, and the group whose ranks hold the rest."""

    def __init__(self, rows: range, group: Group) -> None:
        self.rows, self.group = rows, group

    def argmax(self, logits: Tensor) -> Tensor:
        """The likeliest token of each row, the lowest id among equals. logits: [B, own columns] -> [B] int64."""
        largest, at = logits.max(dim=-1)
        own = torch.stack([largest.double(), (at + self.rows.start).double()])                # ids are exact in fp64
        values, ids = self._everyone(own, "greedy").unbind(1)                                 # [ranks, B] each
        best = values.amax(dim=0)
        return torch.where(values == best, ids, torch.inf).amin(dim=0).long()

    def largest(self, logits: Tensor) -> Tensor:
        """The largest logit of each row over all shards, [B]; NaN where one is NaN. logits: [B, own columns]."""
        return self._everyone(logits.amax(dim=-1), "largest logit").amax(dim=0)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """log of the sum of exp over the whole vocabulary, [B] float64."""
        return self._everyone(logits.double().logsumexp(dim=-1), "log sum exp").logsumexp(dim=0)

    def at(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The logit of one token a row, [B] float64. tokens: [B] int64, anywhere in the vocabulary."""
        local = tokens.to(logits.device) - self.rows.start
        here = (local >= 0) & (local < len(self.rows))
        found = logits.double().gather(-1, local.clamp(0, len(self.rows) - 1)[:, None])[:, 0]
        return self.group.all_reduce(torch.where(here, found, 0.0), "logit of a token")

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits of each row and their ids, [B, count] float64 and int64, largest first."""
        values, ids = self._top(logits.double(), count, -torch.inf)
        by_id = ids.sort(dim=-1, stable=True).indices
        values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return values.gather(-1, order), ids.gather(-1, order)

    def draw(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
        """The token at which each row's cumulative distribution first exceeds its uniform number.

        logits: [B, own columns], float. temperature, top_p, uniforms: [B] float64; top_k: [B] int64, 0 keeps all;
        top_p 1 keeps all. Returns [B] int64. The order of the cuts is the engine's: temperature, top-k, top-p.
        """
        wide = logits.double()
        largest = self._everyone(wide.amax(dim=-1), "largest logit").amax(dim=0)
        weights = torch.exp((wide - largest[:, None]) / temperature[:, None])                 # [B, own]
        total = self._everyone(weights.sum(dim=-1), "sum of weights").sum(dim=0)
        full = weights / total[:, None]
        cut = (top_k > 0) | (top_p < 1)
        if bool(cut.any()):
            full[cut] = full[cut] * self._kept(full[cut], top_k[cut], top_p[cut])
        return self._invert(full, uniforms.double())

    def _invert(self, distribution: Tensor, uniforms: Tensor) -> Tensor:
        """Find each row's token. distribution: [B, own columns] float64, not normalised after a cut."""
        cumulative = distribution.cumsum(dim=-1)
        sums = self._everyone(cumulative[:, -1], "shares of the shards")                      # [ranks, B]
        ends = sums.cumsum(dim=0)
        target = uniforms * ends[-1]
        chosen = torch.searchsorted(ends.T.contiguous(), target[:, None], right=True)[:, 0]   # the rank it falls in
        chosen = chosen.clamp(max=self.group.size - 1)
        before = torch.where(chosen > 0, ends.gather(0, (chosen - 1).clamp(min=0)[None])[0], 0.0)
        local = torch.searchsorted(cumulative, (target - before)[:, None], right=True)[:, 0]
        # Rounding of `before` may carry a target past the shard's last token: take the last that has any weight.
        last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
        token = torch.minimum(local, last) + self.rows.start
        mine = chosen == self.group.index
        return self.group.all_reduce(torch.where(mine, token, 0), "drawn token")

    def _kept(self, full: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """[R, own] bool: own tokens that survive top-k, then top-p. full: [R, own] probabilities."""
        values, ids = self._top(full, CANDIDATES, 0.0)
        enough = torch.where(top_k > 0, top_k <= CANDIDATES, self._reach(values) >= top_p)
        if values.shape[-1] == self.group.size * CANDIDATES and not bool(enough.all()):
            values, ids = self._top(full, 2**31, 0.0)
        order = torch.sort(ids, dim=-1).indices
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        ordered, by_value = values.sort(dim=-1, descending=True, stable=True)                 # equal ones by id
        rank = torch.arange(ordered.shape[-1], device=full.device)
        upto = (ordered * ((rank < top_k[:, None]) | (top_k == 0)[:, None])).cumsum(dim=-1)
        mass = torch.where(top_k > 0, upto[:, -1], 1.0)
        ahead = torch.nn.functional.pad(upto[:, :-1], (1, 0))
        count = (ahead < (top_p * mass)[:, None]).sum(dim=-1)
        count = torch.where(top_p < 1, count, top_k)
        count = torch.where(top_k > 0, torch.minimum(count, top_k), count).clamp(1, ordered.shape[-1])
        last = by_value.gather(-1, count[:, None] - 1)
        edge, edge_id = values.gather(-1, last), ids.gather(-1, last)
        own = torch.arange(self.rows.start, self.rows.stop, device=full.device)
        return (full > edge) | ((full == edge) & (own <= edge_id))

    def _reach(self, candidates: Tensor) -> Tensor:
        """[R]: the mass of the candidates that no unseen token can equal. candidates: [R, ranks * n]."""
        per_rank = candidates.unflatten(-1, (self.group.size, -1))                            # each falling
        floor = per_rank[..., -1].amax(dim=-1, keepdim=True)
        return torch.where(candidates > floor, candidates, 0.0).sum(dim=-1)

    def _top(self, values: Tensor, count: int, fill: float) -> tuple[Tensor, Tensor]:
        """Each rank's `count` largest of values [R, own], with ids: [R, ranks * n] both, n = count or all there are.

        A shard with fewer columns than another gives `fill` for the missing ones, with the id of its last column.
        """
        widest = self._everyone(torch.tensor([len(self.rows)], device=values.device), "widest shard").amax()
        wanted = min(count, int(widest))
        largest, at = (part[:, :wanted] for part in values.sort(dim=-1, descending=True, stable=True))
        short = wanted - largest.shape[1]
        largest = torch.nn.functional.pad(largest, (0, short), value=fill)
        at = torch.nn.functional.pad(at, (0, short), value=len(self.rows) - 1)
        both = torch.stack([largest.double(), (at + self.rows.start).double()])               # [2, R, n]
        everyone = self._everyone(both, "candidates of the shards")                           # [ranks, 2, R, n]
        flat = everyone.permute(1, 2, 0, 3).flatten(2)
        return flat[0], flat[1].long()

    def _everyone(self, x: Tensor, what: str) -> Tensor:
        """[ranks, ...]: x of every rank."""
        return self.group.all_gather(x[None], [1] * self.group.size, what)
