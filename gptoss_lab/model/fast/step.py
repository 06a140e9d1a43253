"""What all layers of one step share: positions, where keys and values go, and a plan of attention per kind of layer.

gpt-oss has two kinds of layer, so a step makes two plans, not one per layer. A prefill's first chunk attends to the
keys it brings (contiguous, the fastest kernels). A later chunk reads a full layer's older keys from its pages; in a
sliding layer the ring has no room for a chunk, so the window before it is copied out of the ring in front of the
chunk's own keys, and only the chunk's tail is written to the ring, after that.

In an e4m3 pool every key is seen as it is kept: the contiguous keys are rounded like the pages, so that a chunk's
border changes nothing. What is lost: those contiguous rows, stored * scale, are rounded once more to bf16 (exact where
a scale is a power of two), while the kernels that read pages multiply by the scale in fp32.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from gptoss_kernels.attention import LayerKind, PagedPrefill, Prefill
from gptoss_kernels.projection import RowPlan
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.paged import PagedCache, PagePool


class Plan(Protocol):
    """A planned attention; q [T, Hq, D], and keys and values or their pages (then scales too), as its class says."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **scales: object
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class KindStep:
    """One kind of layer in a step.

    slots: [T] int32, row of the paged cache for each new token, -1: not kept. contiguous: keys that the plan wants one
    after the other, older ones included; 0 where it reads pages. rows: [T] int32, where among them a new token's key
    goes (None: in order). old_slots, old_rows: [h] int64, rows of the ring to copy, and where to.
    """

    plan: Plan
    slots: torch.Tensor
    contiguous: int = 0
    rows: torch.Tensor | None = None
    old_slots: torch.Tensor | None = None
    old_rows: torch.Tensor | None = None

    def buffers(
        self, pages: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Room for the contiguous keys (or values) of a layer, [contiguous, Hkv, D] in dtype, the old rows copied in;
        scale: [Hkv] of e4m3 pages."""
        if not self.contiguous:
            return None
        rows = pages.flatten(0, 1)
        whole = torch.empty(self.contiguous, *rows.shape[1:], dtype=dtype, device=pages.device)
        if self.old_slots is not None:
            if scale is None:
                old = rows.index_select(0, self.old_slots)
            else:
                old = rows.view(torch.uint8).index_select(0, self.old_slots).view(rows.dtype).float() * scale[:, None]
            whole.index_copy_(0, self.old_rows, old.to(dtype))
        return whole


@dataclass(frozen=True)
class Step:
    """T new tokens. positions: [T] int32. full, sliding: the two kinds. rows: how the rows lie in tiles, for e4m3
    projections (None without). live: [1] int32, rows that are real (None: all)."""

    positions: torch.Tensor
    full: KindStep
    sliding: KindStep
    rows: RowPlan | None = None
    live: torch.Tensor | None = None

    def kind(self, sliding: bool) -> KindStep:
        """The kind of a layer."""
        return self.sliding if sliding else self.full


def layer_kind(pool: PagePool, heads: int, sliding: bool) -> LayerKind:
    """What a kind of layer is to an attention kernel. heads: query heads of this rank."""
    window = pool.config.sliding_window if sliding else None
    return LayerKind(heads, pool.kv_heads, pool.config.head_dim, pool.dtype, window)


def prefill_step(
    pool: PagePool, caches: Sequence[PagedCache], lengths: Sequence[int], heads: int, operations: FastOperations,
    rows: RowPlan | None,
) -> Step:
    """The step that brings lengths[b] new tokens to each cache; their pages are reserved already."""
    starts = [cache.length for cache in caches]
    new = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    full = [page_slots(pool, cache.pages, at) for cache, at in zip(caches, new, strict=True)]
    sliding = [_tail_slots(pool, cache, at) for cache, at in zip(caches, new, strict=True)]
    packed = torch.stack([torch.cat(parts) for parts in (new, full, sliding)]).to(torch.int32)          # [3, T]
    positions, *slots = packed.to(pool.device).unbind(0)
    if any(starts):
        return Step(positions, *_later_chunk(pool, caches, lengths, heads, operations, slots), rows)
    return Step(positions, *_first_chunk(pool, lengths, heads, operations, slots), rows)


def _first_chunk(
    pool: PagePool, lengths: Sequence[int], heads: int, operations: FastOperations, slots: Sequence[torch.Tensor]
) -> tuple[KindStep, KindStep]:
    """Both kinds attend to the step's own keys."""
    offsets, backend = tuple(accumulate(lengths, initial=0)), operations.attention["attention.prefill"]
    full, sliding = (
        KindStep(Prefill(layer_kind(pool, heads, kind), offsets, device=pool.device, backend=backend), at, offsets[-1])
        for kind, at in zip((False, True), slots, strict=True)
    )
    return full, sliding


def _later_chunk(
    pool: PagePool, caches: Sequence[PagedCache], lengths: Sequence[int], heads: int, operations: FastOperations,
    slots: Sequence[torch.Tensor],
) -> tuple[KindStep, KindStep]:
    """Full layers read their pages; sliding ones the window before the chunk, and the chunk."""
    offsets = tuple(accumulate(lengths, initial=0))
    ends = [cache.length + n for cache, n in zip(caches, lengths, strict=True)]
    paged = PagedPrefill(
        layer_kind(pool, heads, False), offsets, ends, page_table(pool, caches, ends), page_size=pool.page_size,
        device=pool.device, backend=operations.attention["attention.paged_prefill"], kv_dtype=pool.keys[0].dtype,
    )
    old = [min(cache.length, pool.config.sliding_window - 1) for cache in caches]
    key_offsets = tuple(accumulate((h + n for h, n in zip(old, lengths, strict=True)), initial=0))
    ragged = Prefill(layer_kind(pool, heads, True), offsets, key_offsets, device=pool.device,
                     backend=operations.attention["attention.prefill"])
    parts = list(zip(caches, key_offsets[:-1], old, lengths, strict=True))
    old_slots = torch.cat([page_slots(pool, c.ring, torch.arange(c.length - h, c.length)) for c, _, h, _ in parts])
    old_rows = torch.cat([torch.arange(begin, begin + h) for _, begin, h, _ in parts])
    new_rows = torch.cat([torch.arange(begin + h, begin + h + n) for _, begin, h, n in parts]).to(torch.int32)
    return KindStep(paged, slots[0]), KindStep(
        ragged, slots[1], key_offsets[-1], *(index.to(pool.device) for index in (new_rows, old_slots, old_rows))
    )


def page_table(pool: PagePool, caches: Sequence[PagedCache], ends: Sequence[int]) -> torch.Tensor:
    """[B, pages] int32 on the CPU: the pages of `ends` positions of each cache."""
    used = [pool.pages_for(end) for end in ends]
    table = torch.zeros(len(caches), max(used), dtype=torch.int32)
    for row, (cache, pages) in enumerate(zip(caches, used, strict=True)):
        table[row, :pages] = torch.tensor(cache.table(False, pages), dtype=torch.int32)
    return table


def page_slots(pool: PagePool, pages: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
    """Row of the paged cache of each position, [n] int64; a ring's pages are taken round and round."""
    if not len(positions):
        return positions
    numbers = torch.tensor(pages)
    return numbers[positions // pool.page_size % len(pages)] * pool.page_size + positions % pool.page_size


def _tail_slots(pool: PagePool, cache: PagedCache, positions: torch.Tensor) -> torch.Tensor:
    """Slots in the ring for the positions that it is meant to hold, -1 for older ones."""
    slots = page_slots(pool, cache.ring, positions)
    slots[: max(0, len(positions) - (pool.config.sliding_window + pool.draft))] = -1
    return slots
