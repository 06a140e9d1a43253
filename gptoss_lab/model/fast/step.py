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
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from gptoss_kernels.attention import LayerKind, PagedPrefill, Prefill
from gptoss_kernels.projection import RowPlan
from gptoss_kernels.quant import Quantised
from gptoss_kernels.upload import upload
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.paged import PagedCache, PagePool


class Plan(Protocol):
    """A planned attention; q [T, Hq, D], and keys and values or their pages (then scales too), as its class says; out:
    where its output goes."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **more: object
    ) -> torch.Tensor | Quantised: ...


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


class PrefillStep:
    """A `Step` that brings lengths[b] new tokens to each cache; their pages are reserved already.

    Its parts are made when a layer first asks for them. By then the embedding, the first norm and the first QKV product
    are launched, so the device works while the host plans; a kind's plan is made where its first layer attends. All of
    it has to be asked for before the caches grow.
    """

    live = None

    def __init__(
        self, pool: PagePool, caches: Sequence[PagedCache], lengths: Sequence[int], heads: int,
        operations: FastOperations, rows: RowPlan | None,
    ) -> None:
        self.rows, self._pool, self._heads, self._backends = rows, pool, heads, operations.attention
        self._caches, self._lengths, self._starts = caches, lengths, [cache.length for cache in caches]
        self._offsets = tuple(accumulate(lengths, initial=0))

    @property
    def positions(self) -> torch.Tensor:
        """[T] int32."""
        return self._places[0]

    @cached_property
    def full(self) -> KindStep:
        """Full layers attend to the step's own keys where all sequences begin here, else they read their pages."""
        pool, kind = self._pool, layer_kind(self._pool, self._heads, False)
        if not any(self._starts):
            return KindStep(self._ragged(kind, self._offsets), self._places[1], self._offsets[-1])
        ends = [start + n for start, n in zip(self._starts, self._lengths, strict=True)]
        return KindStep(PagedPrefill(
            kind, self._offsets, ends, page_table(pool, self._caches, ends), page_size=pool.page_size,
            device=pool.device, backend=self._backends["attention.paged_prefill"], kv_dtype=pool.keys[0].dtype,
        ), self._places[1])

    @cached_property
    def sliding(self) -> KindStep:
        """Sliding layers attend to the window before the chunk and to the chunk, one after the other."""
        pool, kind = self._pool, layer_kind(self._pool, self._heads, True)
        old = [min(start, pool.config.sliding_window - 1) for start in self._starts]
        begins = tuple(accumulate((h + n for h, n in zip(old, self._lengths, strict=True)), initial=0))
        plan = self._ragged(kind, begins)
        if not any(old):
            return KindStep(plan, self._places[2], begins[-1])
        parts = list(zip(self._caches, self._starts, begins[:-1], old, self._lengths, strict=True))
        old_slots = joined([page_slots(pool, c.ring, start - h, start) for c, start, _, h, _ in parts])
        old_rows = torch.cat([torch.arange(begin, begin + h) for _, _, begin, h, _ in parts])
        new_rows = torch.cat([torch.arange(begin + h, begin + h + n) for _, _, begin, h, n in parts]).to(torch.int32)
        return KindStep(plan, self._places[2], begins[-1],
                        *(upload(index, pool.device) for index in (new_rows, old_slots, old_rows)))

    def kind(self, sliding: bool) -> KindStep:
        """The kind of a layer."""
        return self.sliding if sliding else self.full

    @cached_property
    def _places(self) -> torch.Tensor:
        """[3, T] int32 on the device, in one copy: position, row of the pages and row of the ring (-1: not kept)."""
        pool, reach = self._pool, self._pool.config.sliding_window + self._pool.draft
        host = np.empty((3, self._offsets[-1]), dtype=np.int32)                  # a prompt waits for this: no torch
        positions, in_pages, in_ring = host
        in_ring.fill(-1)
        for cache, start, row, end in zip(self._caches, self._starts, self._offsets[:-1], self._offsets[1:],
                                          strict=True):
            stop = start + end - row
            kept = max(start, stop - reach)                                      # what the ring is meant to hold
            positions[row:end] = np.arange(start, stop, dtype=np.int32)
            in_pages[row:end] = page_slots(pool, cache.pages, start, stop)
            in_ring[row + kept - start : end] = page_slots(pool, cache.ring, kept, stop)
        return upload(torch.from_numpy(host), pool.device)

    def _ragged(self, kind: LayerKind, key_offsets: tuple[int, ...]) -> Prefill:
        return _ragged_plan(kind, self._offsets, key_offsets, self._pool.keys[0].device,
                            self._backends["attention.prefill"])


AnyStep = Step | PrefillStep


@lru_cache(maxsize=4)
def _ragged_plan(
    kind: LayerKind, offsets: tuple[int, ...], key_offsets: tuple[int, ...], device: torch.device, backend: str
) -> Prefill:
    """A plan over contiguous keys. It holds nothing but what follows from the lengths, so the next steps of the same
    lengths, on the same stream, take it again; few are kept, since FlashInfer's hold workspaces."""
    return Prefill(kind, offsets, key_offsets, device=device, backend=backend)


def page_table(pool: PagePool, caches: Sequence[PagedCache], ends: Sequence[int]) -> torch.Tensor:
    """[B, pages] int32 on the CPU: the pages of `ends` positions of each cache."""
    used = [pool.pages_for(end) for end in ends]
    table = torch.zeros(len(caches), max(used), dtype=torch.int32)
    for row, (cache, pages) in enumerate(zip(caches, used, strict=True)):
        table[row, :pages] = torch.tensor(cache.table(False, pages), dtype=torch.int32)
    return table


def page_slots(pool: PagePool, pages: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Row of the paged cache of each position from start on, [stop - start] int32; a ring's pages are taken round and
    round."""
    size = pool.page_size
    first = start // size
    begins = size * np.take(np.array(pages, dtype=np.int32), np.arange(first, -(-stop // size)), mode="wrap")
    rows = (begins[:, None] + np.arange(size, dtype=np.int32)).reshape(-1)
    return rows[start - first * size : stop - first * size]


def joined(slots: Sequence[np.ndarray]) -> torch.Tensor:
    """The rows of several spans one after the other, [n] int64 on the CPU, as torch wants an index."""
    return torch.from_numpy(np.concatenate(slots).astype(np.int64))
