"""Splitting the tokens of a step over ranks: who computes which rows, and which keys and values must travel.

The ranks hold all of attention and each computes its own tokens. A full layer needs the keys and values of every token
on every rank (8 heads of 64 twice: a third of a hidden state). A sliding layer needs only the `window - 1` positions
before each of a rank's segments, the halo, and the last window - 1 of a sequence for the caches, which are complete on
every rank.

In a causal layer late tokens cost more than early ones, so a sequence is cut into 2 p pieces and rank r takes pieces r
and 2 p - 1 - r: together the same work everywhere. Sequences too short for that go to one rank each, in turn.

What is lost: caches that can take tokens back keep more than a window, and those rows do not travel, so a decoder that
drafts cannot run on a split sequence.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from gptoss_lab.parallel.cuts import even_ranges
from gptoss_lab.parallel.groups import Group

UNSENT = 0.0
"""What stands in rows that did not travel. Finite, since a paged kernel may multiply it by 0; tests put NaN here."""


@dataclass(frozen=True)
class Segment:
    """New tokens start..stop-1 of sequence number `sequence` of the step, counted from its first new token."""

    sequence: int
    start: int
    stop: int


def split_tokens(lengths: Sequence[int], ranks: int) -> list[list[Segment]]:
    """The segments of each rank, in order of sequence and position. lengths: new tokens of each sequence."""
    segments: list[list[Segment]] = [[] for _ in range(ranks)]
    for b, length in enumerate(lengths):
        if length < 2 * ranks:
            segments[b % ranks].append(Segment(b, 0, length))
            continue
        pieces = even_ranges(length, 2 * ranks)
        for rank in range(ranks):
            early, late = pieces[rank], pieces[2 * ranks - 1 - rank]
            if early.stop == late.start:
                segments[rank].append(Segment(b, early.start, late.stop))
            else:
                segments[rank] += [Segment(b, early.start, early.stop), Segment(b, late.start, late.stop)]
    return segments


@dataclass(frozen=True)
class _Movement:
    """send: own rows in the order of the ranks they go to; counts per rank; rows: where arriving rows belong, [n]."""

    send: torch.Tensor
    sending: list[int]
    rows: torch.Tensor
    receiving: list[int]


class SequenceSplit:
    """One step's tokens over the ranks of `group`.

    lengths: new tokens of each sequence; T in all. keep: whether caches outlive the step. The flat batch has row
    offsets[b] + i for token i of sequence b; a rank's own rows are those of its segments, in their order.
    """

    def __init__(self, lengths: Sequence[int], group: Group, keep: bool, device: torch.device | str = "cpu") -> None:
        self.group, self.keep, self.device = group, keep, torch.device(device)
        self.lengths, self.offsets = tuple(lengths), tuple(accumulate(lengths, initial=0))
        self.segments = split_tokens(lengths, group.size)
        self._rows = [self._flat((s.sequence, s.start, s.stop) for s in own) for own in self.segments]
        self._moves: dict[int | None | str, _Movement] = {}

    @property
    def own(self) -> list[Segment]:
        """This rank's segments."""
        return self.segments[self.group.index]

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [len(rows) for rows in self._rows]

    @cached_property
    def rows(self) -> torch.Tensor:
        """[own] int64: this rank's rows of the flat batch."""
        return self._rows[self.group.index].to(self.device)

    @cached_property
    def by_rank(self) -> torch.Tensor:
        """[T] int64: all rows, those of rank 0 first: the order in which a reduce-scatter deals them out."""
        return torch.cat(self._rows).to(self.device)

    def move(self, x: torch.Tensor, window: int | None, what: str) -> torch.Tensor:
        """Own rows [own, ...] -> the flat batch [T, ...] as far as this rank's attention and caches need it.

        window: None for a full layer, where that is everything. Rows that did not travel are `UNSENT`.
        """
        movement = self._movement(window, lambda: [self._needed(rank, window) for rank in range(self.group.size)])
        return self._run(movement, x, x.new_full((self.offsets[-1], *x.shape[1:]), UNSENT), what)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows [own, H] -> the row of each sequence's last token [B, H], on every rank."""
        ends = torch.tensor([end - 1 for end in self.offsets[1:]], dtype=torch.int64)
        movement = self._movement("last", lambda: [ends] * self.group.size)
        out = self._run(movement, x, x.new_empty(self.offsets[-1], *x.shape[1:]), "last rows")
        return out[ends.to(self.device)]

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows [own, ...] -> all rows [T, ...], on every rank."""
        return self.move(x, None, "all rows")

    def _run(self, movement: _Movement, x: torch.Tensor, out: torch.Tensor, what: str) -> torch.Tensor:
        arrived = self.group.all_to_all(x[movement.send], movement.sending, movement.receiving, what)
        out[movement.rows] = arrived
        return out

    def _movement(self, key: int | None | str, wanted: object) -> _Movement:
        """Who sends which rows to whom so that rank r has wanted()[r] (flat rows, ascending); kept for the step."""
        if key not in self._moves:
            self._moves[key] = self._plan(wanted())
        return self._moves[key]

    def _plan(self, wanted: list[torch.Tensor]) -> _Movement:
        me, size, total = self.group.index, self.group.size, self.offsets[-1]
        owner, place = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
        for rank, rows in enumerate(self._rows):
            owner[rows], place[rows] = rank, torch.arange(len(rows))
        send = [place[rows[owner[rows] == me]] for rows in wanted]
        arriving = [wanted[me][owner[wanted[me]] == source] for source in range(size)]
        return _Movement(torch.cat(send).to(self.device), [len(s) for s in send],
                         torch.cat(arriving).to(self.device), [len(a) for a in arriving])

    def _needed(self, rank: int, window: int | None) -> torch.Tensor:
        if window is None:
            return torch.arange(self.offsets[-1])
        spans = [(s.sequence, max(0, s.start - window + 1), s.stop) for s in self.segments[rank]]
        if self.keep:
            spans += [(b, max(0, n - window + 1), n) for b, n in enumerate(self.lengths)]
        return self._flat(spans).unique()

    def _flat(self, spans: object) -> torch.Tensor:
        """Flat rows of (sequence, start, stop) spans, in their order."""
        parts = [torch.arange(self.offsets[b] + start, self.offsets[b] + stop) for b, start, stop in spans]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
