"""What the ranks of a plan say to each other during a step: the model's collectives, made from groups.

A layer has at most four exchanges. After attention the parts of the heads are summed over the tensor-parallel ranks.
Before the experts a rank may need tokens of others (dispatch), and after them the parts of the experts are summed
(combine). With one data-parallel group every rank has every token already: dispatch picks the tokens of the local
experts and moves nothing, combine is one all-reduce. That is the TP-only scheme of the post. With several groups, or
with a split sequence, tokens differ between "peers", and there are two ways:

    gather       every rank gets all tokens; combine is a reduce-scatter over the peers, then a sum over tp
    all_to_all   a token goes only to ranks that hold one of its experts, and partial sums come back the same way

A group of sequences may be empty; its ranks take part in every exchange with no rows.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.cuts import even_ranges
from gptoss_lab.parallel.groups import Group
from gptoss_lab.parallel.plan import Plan
from gptoss_lab.parallel.residual import ResidualSum
from gptoss_lab.parallel.sequence import SequenceSplit
from gptoss_lab.parallel.share import Place, Share, share_of

DISPATCHES = ("gather", "all_to_all")


@dataclass(frozen=True)
class PlanGroups:
    """This rank's place in a plan and the groups it belongs to: its tp ranks, its dp ranks, the whole world."""

    plan: Plan
    place: Place
    tensor: Group
    data: Group
    world: Group

    def share(self, config: ModelConfig) -> Share:
        """What of the model is here."""
        return share_of(config, self.plan, self.place)


class PlanCollectives:
    """The collectives of one rank (satisfies what `gptoss_lab.model` asks for).

    config: of the whole model. groups: of this rank. dispatch: one of DISPATCHES, for plans in which tokens differ
    between ranks. full_logits: gather the logits over the vocabulary shards (each rank then has all of them); False
    leaves a rank its own columns, for a sampler that works on shards (vocabulary.py).
    """

    def __init__(
        self, config: ModelConfig, groups: PlanGroups, dispatch: str = "gather", full_logits: bool = True
    ) -> None:
        if dispatch not in DISPATCHES:
            raise ValueError(f"dispatch is {dispatch!r}; one of {', '.join(DISPATCHES)} is expected")
        self.config, self.groups, self.share = config, groups, groups.share(config)
        self.full_logits, self.routed = full_logits, dispatch == "all_to_all"
        split = groups.plan.sequence_split
        self.peers = groups.world if split else groups.data         # ranks whose tokens differ from ours
        self.copies = Group() if split else groups.tensor           # ranks that have the same tokens
        self.may_idle = groups.plan.dp > 1
        self._counts: list[int] = []
        self._split: SequenceSplit | None = None
        self._sent: _Sent | None = None
        self._sum: ResidualSum | None = None

    def start(self, lengths: Sequence[int], keep: bool, device: torch.device) -> SequenceSplit | None:
        """A step begins: tell the peers how many rows are here. Returns the split of its tokens, None where none is."""
        self._split = SequenceSplit(lengths, self.groups.tensor, keep, device) if self.peers_split else None
        rows = sum(lengths) if self._split is None else len(self._split.rows)
        if self.peers.size == self.groups.tensor.size and self._split is not None:
            self._counts = self._split.counts
        elif self.peers.size == 1:
            self._counts = [rows]
        else:
            mine = torch.tensor([rows], device=device)
            self._counts = self.peers.all_gather(mine, [1] * self.peers.size, "rows of the step").tolist()
        return self._split

    def residual_sum(self, rows: int, dtype: torch.dtype, device: torch.device, calls: int) -> ResidualSum:
        """Residual and sum over the tp ranks in one step, of up to `rows` rows at once; see `ResidualSum`.

        Its buffers are made by all ranks together, at the first call and again only for more rows.
        """
        if self._sum is None or self._sum.rows < rows:
            self._sum = ResidualSum(self.groups.tensor, rows, self.config.hidden_size, dtype, device, calls)
        return self._sum

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each peer in this step, which `start` began."""
        return tuple(self._counts)

    @property
    def peers_split(self) -> bool:
        """Whether the plan splits the tokens of a step."""
        return self.groups.plan.sequence_split

    def reduce_embedding(self, part: torch.Tensor) -> torch.Tensor:
        """[T, H], zero where a token's row is on another rank -> [T, H] (or the own rows of a split step)."""
        if self._split is None:
            return self.groups.tensor.all_reduce(part, "embedding")
        return self.groups.tensor.reduce_scatter(part[self._split.by_rank], self._split.counts, "embedding")

    def reduce_attention(self, part: torch.Tensor) -> torch.Tensor:
        """[T, H] of this rank's heads -> [T, H], summed over the ranks that share the heads."""
        return self.copies.all_reduce(part, "attention")

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Own tokens [T, H] with their experts [T, k] -> those that the experts here must see."""
        if self.peers.size == 1:
            return x, ids, weights
        if self.routed:
            self._sent = _Sent(self._destinations(ids), self.peers)
            return tuple(self._sent.go(value, "dispatch") for value in (x, ids, weights))
        return tuple(self.peers.all_gather(value, self._counts, "dispatch") for value in (x, ids, weights))

    def combine(self, part: torch.Tensor) -> torch.Tensor:
        """[T', H] of the experts here -> own tokens [T, H], summed over all ranks."""
        if self.peers.size > 1 and self.routed:
            part = self._sent.back(part, "combine")
        elif self.peers.size > 1:
            part = self.peers.reduce_scatter(part, self._counts, "combine")
        return self.copies.all_reduce(part, "combine")

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, own vocabulary rows] -> [B, V] where full logits were asked for."""
        group = self.groups.tensor
        if not self.full_logits or group.size == 1 or not len(logits):
            return logits
        counts = [len(rows) for rows in even_ranges(self.config.vocab_size, group.size)]
        return group.all_gather(logits.T, counts, "logits").T

    def _destinations(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """For each peer, the rows of ids [T, k] with an expert there."""
        shares = [share_of(self.config, self.groups.plan, rank) for rank in self._peer_ranks()]
        return [
            ((ids >= s.experts.start) & (ids < s.experts.stop)).any(dim=1).nonzero()[:, 0] for s in shares
        ]

    def _peer_ranks(self) -> list[int]:
        plan = self.groups.plan
        return list(range(plan.world)) if self.peers_split else [n * plan.tp + self.groups.place.tp
                                                                 for n in range(plan.dp)]


class _Sent:
    """One routed dispatch: which rows went to which peer, so that their partial sums find back."""

    def __init__(self, rows: list[torch.Tensor], peers: Group) -> None:
        self.rows, self.peers = rows, peers
        self.sending = [len(r) for r in rows]
        counts = torch.tensor(self.sending, device=rows[0].device)
        self.receiving = peers.all_to_all(counts, [1] * peers.size, [1] * peers.size, "dispatch, counts").tolist()
        self.total = 0

    def go(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """Rows of own tokens [T, ...] -> those that arrive here."""
        self.total = value.shape[0]
        return self.peers.all_to_all(value[torch.cat(self.rows)], self.sending, self.receiving, what)

    def back(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """Partial sums of the rows that arrived -> [T, H], summed per own token in fp32 at least."""
        parts = self.peers.all_to_all(part, self.receiving, self.sending, what)
        wide = torch.promote_types(part.dtype, torch.float32)
        total = torch.zeros(self.total, *part.shape[1:], dtype=wide, device=part.device)
        return total.index_add_(0, torch.cat(self.rows), parts.to(wide)).to(part.dtype)
