"""One token for each sequence, or a few, in buffers that stay where they are: what a CUDA graph can replay.

A row of the step is one token. Tokens of one sequence take rows of their own, each with its own length and the same
page table: when attention runs all of them have written their keys, and a row's length hides those after it. So the
step that verifies k drafted tokens is decode of k + 1 rows a sequence, with the same kernels, and how many each
sequence brings may differ from step to step. A ring holds that many positions beside a window (`PagePool.draft`).

A captured step reads ids, positions, lengths, page tables and slots from fixed addresses. `fill` writes all of them for
the requests at hand and for the rows that no request has: those get length 1, page 0, ring 0, which belong to nobody,
and `live` says how many rows are real, so that the router gives the others no expert. So nothing of an earlier batch
is left in any buffer, whoever comes next (a stale table would make fluent nonsense, and only with graphs).

Numbers of a step go to the device in one copy from pinned memory; the tables go only when a sequence came, left or took
a page. The host may run one step ahead: it waits until the last copy has been read before it writes there again.

What is lost: attention reads a sequence's keys once for each of its rows (from the L2 cache where they fit), and spare
rows cost what real ones do except for experts.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gptoss_kernels.attention import PagedDecode
from gptoss_kernels.projection import RowPlan
from gptoss_kernels.registry import BackendUnavailable
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.fast.step import KindStep, Step, layer_kind
from gptoss_lab.model.paged import PagedCache, PagePool

_HOST_PLANNED = ("flashinfer-fa2",)


class DecodeStep:
    """The buffers and plans of a decode step of `batch` rows, of which the first are real.

    max_kv_len: the most tokens that a sequence may have. ids: [batch] int64. step: what the forward takes.
    BackendUnavailable for an attention backend that has to plan every step on the host.
    """

    def __init__(
        self, pool: PagePool, batch: int, max_kv_len: int, heads: int, operations: FastOperations,
        rows: RowPlan | None,
    ) -> None:
        self.pool, self.batch, self.max_kv_len = pool, batch, max_kv_len
        self.plans = [
            PagedDecode(layer_kind(pool, heads, sliding), batch=batch, max_kv_len=max_kv_len, page_size=pool.page_size,
                        device=pool.device, backend=operations.attention["attention.paged_decode"],
                        kv_dtype=pool.keys[0].dtype)
            for sliding in (False, True)
        ]
        for plan in self.plans:
            if plan.choice.backend in _HOST_PLANNED:
                raise BackendUnavailable(f"attention.paged_decode: {plan.choice.backend} plans every step on the host "
                                         "and cannot be captured; triton or xqa can")
        pinned, columns = pool.device.type == "cuda", pool.pages_for(max_kv_len)
        self._host = torch.zeros(4 * batch + 1, dtype=torch.int32, pin_memory=pinned)
        self._host_tables = torch.zeros(2, batch, columns, dtype=torch.int32, pin_memory=pinned)
        self._numbers, self._tables = self._host.numpy(), self._host_tables.numpy()
        device = torch.zeros(4 * batch + 1, dtype=torch.int32, device=pool.device)
        self._device, self._device_tables = device, torch.zeros(2, batch, columns, dtype=torch.int32,
                                                                device=pool.device)
        positions, self._lens, to_pages, to_ring = device[: 4 * batch].view(4, batch).unbind(0)
        self.ids = torch.zeros(batch, dtype=torch.int64, device=pool.device)
        self.step = Step(positions, KindStep(self.plans[0], to_pages), KindStep(self.plans[1], to_ring), rows,
                         device[4 * batch :])
        self._held: list[tuple[list[int], list[int]] | None] = [None] * batch
        self._copied = torch.cuda.Event() if pinned else None
        self.fill(self.ids[:0], [])

    def fill(
        self, ids: torch.Tensor, caches: Sequence[PagedCache], lengths: Sequence[int] | None = None
    ) -> None:
        """Make the step one of these sequences.

        ids: [n] int64 on the device, one sequence's after the other's. lengths: how many each has, n in all (default:
        one each). caches: with room for them. ValueError for counts that do not fit or a sequence that is too long.
        """
        owners = list(caches) if lengths is None else [
            cache for cache, count in zip(caches, lengths, strict=True) for _ in range(count)]
        places = [n for count in lengths or () for n in range(count)] or [0] * len(owners)
        if len(owners) > self.batch or len(owners) != ids.shape[0]:
            raise ValueError(f"{ids.shape[0]} ids and caches for {len(owners)} rows, for a step of {self.batch} rows; "
                             "one of each per row, and no more rows")
        if self._copied is not None:
            self._copied.synchronize()
        positions, lens, to_pages, to_ring = self._numbers[:-1].reshape(4, self.batch)
        real, size = len(owners), self.pool.page_size
        for row, (cache, place) in enumerate(zip(owners, places, strict=True)):
            at = cache.length + place
            if at >= self.max_kv_len:
                raise ValueError(f"a sequence of {at + 1} tokens does not fit this decode step; at most "
                                 f"{self.max_kv_len} do")
            page, inside = divmod(at, size)
            positions[row], lens[row] = at, at + 1
            to_pages[row] = cache.pages[page] * size + inside
            to_ring[row] = cache.ring[page % len(cache.ring)] * size + inside
        positions[real:], lens[real:], to_pages[real:], to_ring[real:] = 0, 1, 0, 0
        self._numbers[-1] = real
        changed = self._fill_tables(owners)
        self._device.copy_(self._host, non_blocking=True)
        if changed:
            self._device_tables.copy_(self._host_tables, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.ids[:real].copy_(ids)
        self.ids[real:].zero_()

    def begin(self) -> None:
        """The part of a captured step that comes before the layers: lengths and tables to where the plans read them."""
        for plan, table in zip(self.plans, self._device_tables.unbind(0), strict=True):
            plan.step(self._lens, table)

    def _fill_tables(self, owners: Sequence[PagedCache]) -> bool:
        """Bring the rows of both tables up to date; whether any changed. A cache's list of pages is never changed in
        place, so the very same lists mean the same row."""
        changed = False
        for row in range(self.batch):
            now = (owners[row].pages, owners[row].ring) if row < len(owners) else None
            held = self._held[row]
            if now is held or (now and held and now[0] is held[0] and now[1] is held[1]):
                continue
            changed, self._held[row] = True, now
            full, sliding = self._tables[:, row]
            full[:], sliding[:] = 0, 0
            if now:
                used = min(len(now[0]), len(full))
                full[:used] = now[0][:used]
                sliding[:] = np.resize(now[1], len(sliding))
        return changed
