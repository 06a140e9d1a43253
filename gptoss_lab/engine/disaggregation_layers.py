"""Keys and values of one prompt handed over layer by layer, from the pages of one fast model into those of another.

While layer n's experts run, layer n's keys and values are on their way: the prefill step tells after every attention
(`observe`), and what is sent then travels beside the rest of the step. A full layer sends all positions, a sliding one
its last window - 1. Only the last layer's experts and the head have nothing left to hide behind.

This is for a prompt that is read in one step. One that is read in chunks hides its pages behind the next chunk
(disaggregation.py). What is lost: a copy of each layer's rows out of the pages and one into them.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptoss_kernels.upload import upload
from gptoss_lab.engine.disaggregation_routes import Route
from gptoss_lab.model.fast.step import joined, page_slots
from gptoss_lab.model.paged import PagedCache
from gptoss_lab.parallel.groups import Group


class LayerSender:
    """Hand it to a model as `observe` for the step that reads a whole prompt; `finish` waits until all has gone.

    group: of all ranks. routes: those of this sender. cache: of the prompt, empty until the step, its pages reserved by
    it. length: tokens of the prompt. first_head: the first key/value head on this rank.
    """

    def __init__(
        self, group: Group, routes: Sequence[Route], cache: PagedCache, length: int, first_head: int = 0
    ) -> None:
        self.group, self.routes, self.cache = group, list(routes), cache
        self._first, self._rows = first_head, LayerRows(cache, length)
        self._pending: list[Callable[[], None]] = []

    def __call__(self, what: str, layer: int, x: torch.Tensor) -> None:
        """Layer `layer`'s keys and values are in the pages: start sending them."""
        at = self._rows(layer)
        pages = [of[layer].flatten(0, 1) for of in (self.cache.pool.keys, self.cache.pool.values)]
        for route in self.routes:
            heads = slice(route.heads.start - self._first, route.heads.stop - self._first)
            block = torch.stack([_bytes(rows[:, heads]).index_select(0, at) for rows in pages])     # [2, n, heads, D]
            self._pending.append(self.group.send(block, route.receiver, f"layer {layer}"))

    def finish(self) -> None:
        """Wait until everything has gone."""
        while self._pending:
            self._pending.pop()()


def receive_layers(
    group: Group, routes: Sequence[Route], cache: PagedCache, length: int, first_head: int = 0
) -> None:
    """Fill an empty cache with the `length` positions that `LayerSender`s send, and commit them.

    routes: those of this receiver. CacheFull, before anything is received, if the pool has too few pages.
    """
    cache.reserve(length)
    rows_of = LayerRows(cache, length)
    for layer in range(cache.pool.config.num_layers):
        at = rows_of(layer)
        for route in routes:
            heads = slice(route.heads.start - first_head, route.heads.stop - first_head)
            pages = [_bytes(of[layer].flatten(0, 1)[:, heads]) for of in (cache.pool.keys, cache.pool.values)]
            shape = (2, len(at), len(route.heads), cache.pool.config.head_dim)
            block = group.receive(pages[0].new_empty(shape), route.sender, f"layer {layer}")
            for rows, part in zip(pages, block, strict=True):
                rows.index_copy_(0, at, part)
    cache.commit(length)


class LayerRows:
    """The flat rows of the pages that hold what travels of a layer, in order of position: [n] int64 on the device.

    Worked out once for each kind of layer, when the first one asks (the pages are taken by then): a stop for the host
    at every layer would be one for the step that it is to hide behind.
    """

    def __init__(self, cache: PagedCache, length: int) -> None:
        self._cache, self._length = cache, length
        self._found: dict[bool, torch.Tensor] = {}

    def __call__(self, layer: int) -> torch.Tensor:
        """The rows of a layer."""
        sliding = self._cache.pool.config.is_sliding(layer)
        if sliding not in self._found:
            self._found[sliding] = self._of_kind(sliding)
        return self._found[sliding]

    def _of_kind(self, sliding: bool) -> torch.Tensor:
        pool, pages = self._cache.pool, self._cache.ring if sliding else self._cache.pages
        start = max(0, self._length - pool.config.sliding_window + 1) if sliding else 0
        return upload(joined([page_slots(pool, pages, start, self._length)]), pool.device)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 rows as bytes, which every exchange and index can move; others as they are."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
