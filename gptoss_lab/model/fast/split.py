"""A prefill step of which this rank computes only some tokens: its segments, and what it must see of the others.

All of attention is on every rank, and every rank's pages come to hold the whole sequence, as in the plain model
(model/step.py): a full layer's keys and values go to everyone, a sliding layer's only as far as the halo before a
segment and the last window - 1 of a sequence. A first chunk's segments attend to contiguous keys, copied one segment
after the other: 2 KB a key against a layer's work on it. A later chunk of a full layer reads pages, which hold the
chunk by then; in a sliding layer the window before the chunk is copied out of the ring first.

Decode is not split: a step's weights must be read for one row or for many, so each rank runs all of attention on all
rows and the experts' parts are summed, one exchange a layer. What is lost is that every rank reads all keys. The plain
model deals the rows out instead, one sequence to each rank in turn, and moves their keys.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gptoss_kernels.attention import LayerKind, PagedPrefill, Prefill
from gptoss_kernels.reference.quant import E4M3_MAX
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.fast.step import Plan, joined, layer_kind, page_slots, page_table
from gptoss_lab.model.paged import PagedCache, PagePool
from gptoss_lab.parallel.sequence import Segment, SequenceSplit

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SplitKind:
    """One kind of layer in a split step.

    plan: attention of the own segments, each a sequence of its own; None without any. window: None in full layers.
    slots: [own] int32, all -1: keys are kept when they have travelled. kept, at: [n] int64, which rows of the whole
    step the pages keep, and in which row of the pages. rows: [R] int64, the contiguous keys of the segments, numbers in
    (old rows, then the step's rows); None where the plan reads pages. old: [h] int64, rows of the ring to begin with.
    """

    plan: Plan | None
    window: int | None
    slots: torch.Tensor
    kept: torch.Tensor
    at: torch.Tensor
    rows: torch.Tensor | None = None
    old: torch.Tensor | None = None

    def seen(self, moved: Pair, pages: Pair, scales: Pair | None) -> Pair | None:
        """Keys and values [R, Hkv, D] that the segments attend to; None where the plan reads the pages. Before `keep`.
        """
        if self.rows is None:
            return None
        keys, values = (
            (part if self.old is None else torch.cat([_read(stored, self.old, scale, part.dtype), part]))
            .index_select(0, self.rows)
            for part, stored, scale in zip(moved, pages, scales or (None, None), strict=True))
        return keys, values

    def keep(self, moved: Pair, pages: Pair, scales: Pair | None) -> None:
        """Put what the caches keep of the step's keys and values [T, Hkv, D] into the pages."""
        for part, stored, scale in zip(moved, pages, scales or (None, None), strict=True):
            _write(stored, self.at, part.index_select(0, self.kept), scale)


def split_kinds(
    pool: PagePool, caches: Sequence[PagedCache], split: SequenceSplit, heads: int, operations: FastOperations
) -> tuple[torch.Tensor, SplitKind, SplitKind]:
    """A step that brings split.lengths[b] new tokens to each cache; their pages are reserved already.

    Returns the own positions [own] int32, and what full and sliding layers need.

    ValueError for a pool whose rings keep drafted tokens: those rows do not travel.
    """
    if pool.draft:
        raise ValueError(f"the pool's rings keep {pool.draft} drafted positions; a split prompt moves the window alone")
    own, starts, window = split.own, [cache.length for cache in caches], pool.config.sliding_window
    places = [torch.arange(s.start, s.stop) + starts[s.sequence] for s in own]
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(torch.int32).to(pool.device)
    nowhere = torch.full_like(positions, -1)
    full = _kept(pool, [(cache.pages, cache.length, 0, n) for cache, n in zip(caches, split.lengths, strict=True)],
                 split)
    sliding = _kept(pool, [(cache.ring, cache.length, max(0, n - window + 1), n)
                           for cache, n in zip(caches, split.lengths, strict=True)], split)
    return (positions, _full(pool, caches, split, heads, operations, nowhere, full),
            _sliding(pool, caches, split, heads, operations, nowhere, sliding))


def own_keys(pool: PagePool, x: torch.Tensor) -> Pair:
    """Room for the turned keys and the values of x's rows, [own, Hkv, D] each."""
    shape = (x.shape[0], pool.kv_heads, pool.config.head_dim)
    return x.new_empty(shape), x.new_empty(shape)


def _kept(pool: PagePool, spans: Sequence[tuple[list[int], int, int, int]], split: SequenceSplit) -> Pair:
    """kept, at (see SplitKind) of (pages, cached, first, last) spans: new tokens first..last-1 of each sequence."""
    kept = [torch.arange(offset + first, offset + last)
            for offset, (_, _, first, last) in zip(split.offsets[:-1], spans, strict=True)]
    at = [page_slots(pool, pages, cached + first, cached + last) for pages, cached, first, last in spans]
    return torch.cat(kept).to(pool.device), joined(at).to(pool.device)


def _full(
    pool: PagePool, caches: Sequence[PagedCache], split: SequenceSplit, heads: int, operations: FastOperations,
    slots: torch.Tensor, kept: Pair,
) -> SplitKind:
    """Contiguous keys where all sequences begin here, pages otherwise."""
    own, kind = split.own, layer_kind(pool, heads, False)
    if not own:
        return SplitKind(None, None, slots, *kept)
    if not any(cache.length for cache in caches):
        spans = [range(split.offsets[s.sequence], split.offsets[s.sequence] + s.stop) for s in own]
        return SplitKind(_ragged(kind, own, spans, pool, operations), None, slots, *kept, _rows(spans, pool))
    holders = [caches[s.sequence] for s in own]
    ends = [cache.length + s.stop for cache, s in zip(holders, own, strict=True)]
    plan = PagedPrefill(
        kind, _offsets(own), ends, page_table(pool, holders, ends), page_size=pool.page_size, device=pool.device,
        backend=operations.attention["attention.paged_prefill"], kv_dtype=pool.keys[0].dtype)
    return SplitKind(plan, None, slots, *kept)


def _sliding(
    pool: PagePool, caches: Sequence[PagedCache], split: SequenceSplit, heads: int, operations: FastOperations,
    slots: torch.Tensor, kept: Pair,
) -> SplitKind:
    """The halo before each segment and its own keys, one after the other."""
    window, own = pool.config.sliding_window, split.own
    before = [min(cache.length, window - 1) for cache in caches]                 # rows that come out of the rings
    begins = tuple(accumulate(before, initial=0))
    old = [page_slots(pool, cache.ring, cache.length - h, cache.length)
           for cache, h in zip(caches, before, strict=True)]
    spans: list[torch.Tensor] = []
    for s in own:
        places = torch.arange(max(-before[s.sequence], s.start - window + 1), s.stop)
        in_ring = begins[s.sequence + 1] + places                                # places below 0
        in_step = begins[-1] + split.offsets[s.sequence] + places
        spans.append(torch.where(places < 0, in_ring, in_step))
    plan = _ragged(layer_kind(pool, heads, True), own, spans, pool, operations) if own else None
    return SplitKind(plan, window, slots, *kept, _rows(spans, pool), joined(old).to(pool.device) if begins[-1]
                     else None)


def _ragged(
    kind: LayerKind, own: Sequence[Segment], spans: Sequence[range | torch.Tensor], pool: PagePool,
    operations: FastOperations,
) -> Prefill:
    """Attention of the segments to contiguous keys, len(spans[n]) of segment n."""
    key_offsets = tuple(accumulate(map(len, spans), initial=0))
    return Prefill(kind, _offsets(own), key_offsets, device=pool.device,
                   backend=operations.attention["attention.prefill"])


def _offsets(own: Sequence[Segment]) -> tuple[int, ...]:
    """Row offsets of the segments, [segments + 1]."""
    return tuple(accumulate((s.stop - s.start for s in own), initial=0))


def _rows(spans: Sequence[range | torch.Tensor], pool: PagePool) -> torch.Tensor:
    """[R] int64 on the device: all spans one after the other."""
    parts = [torch.arange(s.start, s.stop) if isinstance(s, range) else s for s in spans]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(pool.device)


def _read(pages: torch.Tensor, at: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows `at` [h] of the pages, [h, Hkv, D] in dtype; scale: [Hkv] of e4m3 pages."""
    rows = pages.flatten(0, 1)
    if scale is None:
        return rows.index_select(0, at)
    stored = rows.view(torch.uint8).index_select(0, at).view(rows.dtype)
    return (stored.float() * scale[:, None]).to(dtype)


def _write(pages: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Put rows [n, Hkv, D] at the rows `at` of the pages. Of e4m3 pages they are what those hold times the scale, so
    dividing and rounding finds the very code again."""
    stored = pages.flatten(0, 1)
    if scale is None:
        stored.index_copy_(0, at, rows)
        return
    codes = (rows.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(pages.dtype)
    stored.view(torch.uint8).index_copy_(0, at, codes.view(torch.uint8))
