"""Keys and values of many sequences in one pool: pages for the full layers, a ring of pages for the sliding ones.

What: the pool owns all memory, made once. A full layer's positions lie in pages of `page_size` rows that a sequence
takes as it grows and gives back when it ends, so nothing moves and nothing is copied when it grows. All full layers use
the same page numbers. A sliding layer never needs more than its window, so a sequence takes one ring of pages for good:
its position p lies where p would lie in the pages, the page number taken modulo the ring's length.

How much: half of the layers keep everything and half keep the window, so a sequence of 131,072 tokens of gpt-oss-120b
holds 4.84 GB, not 9.66. The ring has room for `draft` positions more than a window: tokens that a decoder feeds on
trial and takes back with `truncate` would otherwise have overwritten rows that the window still needs.

Storage is the model's dtype, or e4m3 with one scale per layer and key/value head (kv_form "fp8", half the bytes). Rows
are rounded as they arrive, and the step that brings them attends to the rounded ones too, so that what a sequence sees
does not depend on how its prompt was cut into chunks.

Page 0 and ring 0 belong to nobody: the padding rows of a captured graph are written there.
What is lost: `extend`, for the plain forward, copies the rows together at every step (kernels read the pages by
`table`); up to page_size - 1 rows of a sequence's last page and of its ring are empty.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from gptoss_kernels.reference.quant import E4M3_MAX
from gptoss_lab.config import ModelConfig

KV_FORMS = ("same", "fp8")


class CacheFull(RuntimeError):
    """No page or no ring is free for what was asked."""


def ring_pages(window: int, page_size: int, draft: int) -> int:
    """Pages that hold any window - 1 + (1 + draft) positions in a row, wherever in a page they begin."""
    return (window - 1 + (1 + draft) + page_size - 2) // page_size + 1


class PagePool:
    """The memory for keys and values of all sequences, and who holds which part of it.

    config: shapes. pages: of the full layers, page 0 included. rings: one for each sequence at a time, ring 0 included.
    page_size: rows of a page. draft: positions that `PagedCache.truncate` may take back in sliding layers. dtype: in
    which rows come and go. kv_heads: those of this rank (default: all). kv_form: "same" stores dtype, "fp8" e4m3.

    keys[n], values[n]: layer n, [pages or rings * ring_pages, page_size, Hkv, D] in dtype or float8_e4m3fn. With "fp8"
    key_scales and value_scales are [L, Hkv] fp32, 1 until they are set (see kv_scales.py), and row = stored * scale;
    what lies beyond 448 scales is cut there. ValueError for a number out of range.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        rings: int,
        page_size: int = 64,
        draft: int = 0,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_heads: int | None = None,
        kv_form: str = "same",
    ) -> None:
        for name, value, least in (("pages", pages, 2), ("rings", rings, 2), ("page_size", page_size, 1),
                                   ("draft", draft, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; at least {least} is expected (number 0 is for padding)"
                                 if least == 2 else f"{name} is {value}; at least {least} is expected")
        if kv_form not in KV_FORMS:
            raise ValueError(f"kv_form is {kv_form!r}; 'same' or 'fp8'")
        self.config, self.dtype, self.device, self.kv_form = config, dtype, torch.device(device), kv_form
        self.pages, self.rings, self.page_size, self.draft = pages, rings, page_size, draft
        self.kv_heads = config.num_kv_heads if kv_heads is None else kv_heads
        self.ring_pages = ring_pages(config.sliding_window, page_size, draft)
        stored = torch.float8_e4m3fn if kv_form == "fp8" else dtype
        counts = [rings * self.ring_pages if config.is_sliding(n) else pages for n in range(config.num_layers)]
        self.keys, self.values = (
            [torch.zeros(count, page_size, self.kv_heads, config.head_dim, dtype=stored, device=self.device)
             for count in counts]
            for _ in range(2)
        )
        shape = (config.num_layers, self.kv_heads)
        self.key_scales, self.value_scales = (
            (torch.ones(shape, device=self.device) for _ in range(2)) if kv_form == "fp8" else (None, None)
        )
        self._free_pages = list(range(pages - 1, 0, -1))
        self._free_rings = list(range(rings - 1, 0, -1))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, page 0 not counted."""
        return len(self._free_pages)

    @property
    def free_rings(self) -> int:
        """Rings that no sequence holds, ring 0 not counted."""
        return len(self._free_rings)

    @property
    def bytes(self) -> int:
        """Bytes of all pages, rings and scales, held or not."""
        scales = [] if self.key_scales is None else [self.key_scales, self.value_scales]
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, *scales))

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` positions take."""
        return -(-tokens // self.page_size)

    def new_cache(self) -> PagedCache:
        """An empty cache for one sequence. It holds a ring from now on, and no page yet. CacheFull if none is free."""
        if not self._free_rings:
            raise CacheFull(f"all {self.rings - 1} rings are held; a sequence has to end before another can start")
        return PagedCache(self, self._free_rings.pop())

    def _take(self, count: int) -> list[int]:
        """`count` pages, or CacheFull and none."""
        if count > len(self._free_pages):
            raise CacheFull(f"{count} more pages of {self.page_size} positions are needed; {len(self._free_pages)} of "
                            f"{self.pages - 1} are free")
        return [self._free_pages.pop() for _ in range(count)]

    def _give(self, pages: Sequence[int], ring: int | None = None) -> None:
        self._free_pages.extend(reversed(pages))
        if ring is not None:
            self._free_rings.append(ring)


class PagedCache:
    """Keys and values of one sequence in a pool; `PagePool.new_cache` makes one.

    length: tokens seen so far, the position of the next one. pages: physical pages of the full layers, in the order of
    the positions. ring: physical pages of the ring.
    """

    def __init__(self, pool: PagePool, ring: int) -> None:
        self.pool, self.length = pool, 0
        self.pages: list[int] = []
        self.ring = list(range(ring * pool.ring_pages, (ring + 1) * pool.ring_pages))
        self._number: int | None = ring
        self._oldest = 0                                          # first position that `truncate` may count on
        self._index: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._unwritten: list[_PagedSliding] = []                 # layers whose last `extend` is not in the ring yet

    @cached_property
    def layers(self) -> list[_PagedFull | _PagedSliding]:
        """As a `SequenceCache` has them, one for each layer; made when asked for, since kernels never need them."""
        config = self.pool.config
        return [(_PagedSliding if config.is_sliding(n) else _PagedFull)(self, _Rows(self.pool, n))
                for n in range(config.num_layers)]

    def reserve(self, tokens: int) -> None:
        """Take pages so that `length + tokens` positions fit. CacheFull if there are too few; none is taken then."""
        self._check_held()
        missing = self.pool.pages_for(self.length + tokens) - len(self.pages)
        if missing > 0:
            self.pages = self.pages + self.pool._take(missing)    # a new list: who kept the old one sees a change

    def table(self, layer_is_sliding: bool, logical_pages: int) -> list[int]:
        """Physical page of each of the first `logical_pages` logical pages, as paged attention takes them.

        A sliding layer's old logical pages name pages that newer ones have overwritten: attention with its window does
        not read there. ValueError for more pages of a full layer than the sequence holds.
        """
        if layer_is_sliding:
            return [self.ring[page % len(self.ring)] for page in range(logical_pages)]
        if logical_pages > len(self.pages):
            raise ValueError(f"{logical_pages} logical pages were asked for; the sequence holds {len(self.pages)}")
        return self.pages[:logical_pages]

    def commit(self, tokens: int) -> None:
        """Keep what this step wrote, by `extend` or by a kernel: `tokens` new positions."""
        for layer in self._unwritten:
            layer.commit()
        self._unwritten.clear()
        self.length += tokens
        self._oldest = max(self._oldest, self.length - self._reach + 1)

    def truncate(self, length: int) -> None:
        """Take back the positions from `length` on, and give back the pages that only they used.

        ValueError if a sliding layer no longer holds the window before `length`: after a long sequence, that is for
        more than `draft` positions in all since the last time it grew.
        """
        self._check_held()
        if not 0 <= length <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens cannot be cut to {length}")
        if max(0, length - self.pool.config.sliding_window + 1) < self._oldest:
            raise ValueError(f"a sequence of {self.length} tokens cannot be cut to {length}: its rings keep "
                             f"{self.pool.draft} positions more than the window")
        self.length = length
        kept = self.pool.pages_for(length)
        if kept < len(self.pages):
            self.pool._give(self.pages[kept:])
            self.pages = self.pages[:kept]

    def release(self) -> None:
        """Give everything back to the pool. A second time does nothing; any other use afterwards is an error."""
        if self._number is not None:
            self.pool._give(self.pages, self._number)
            self.pages, self.ring, self._number = [], [], None

    @property
    def bytes(self) -> int:
        """Bytes of the rows kept: all in full layers, at most window + draft in sliding ones."""
        kept = [min(self.length, self._reach) if self.pool.config.is_sliding(n) else self.length
                for n in range(self.pool.config.num_layers)]
        return sum(kept) * self._row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages and ring held, empty rows included."""
        config = self.pool.config
        held = [len(self.ring if config.is_sliding(n) else self.pages) for n in range(config.num_layers)]
        return sum(held) * self.pool.page_size * self._row_bytes

    @property
    def _reach(self) -> int:
        """Positions a ring holds for sure: a window, whose last position is the newest, and `draft` before it."""
        return self.pool.config.sliding_window + self.pool.draft

    @property
    def _row_bytes(self) -> int:
        return 2 * self.pool.kv_heads * self.pool.config.head_dim * self.pool.keys[0].element_size()

    def _rows_of(self, what: str) -> torch.Tensor:
        """[pages * page_size] int64 on the device: the row of the flat storage for each position of "pages" or "ring".

        Made when `extend` asks, and again when the pages are others; kernels that write pages never need it.
        """
        pages = getattr(self, what)
        if what not in self._index or self._index[what][0] is not pages:
            first = torch.tensor(pages, dtype=torch.long) * self.pool.page_size
            rows = (first[:, None] + torch.arange(self.pool.page_size)).flatten().to(self.pool.device)
            self._index[what] = pages, rows
        return self._index[what][1]

    def _check_held(self) -> None:
        if self._number is None:
            raise ValueError("this cache was released; `PagePool.new_cache` makes another")


class _Rows:
    """One layer's storage as flat rows: [rows, Hkv, D] in dtype going in and coming out."""

    def __init__(self, pool: PagePool, layer: int) -> None:
        self.dtype, self.fp8 = pool.dtype, pool.kv_form == "fp8"
        self._stored = [pages[layer].flatten(0, 1) for pages in (pool.keys, pool.values)]
        self._pool, self._layer = pool, layer

    def round(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What will be read once these rows were written."""
        if not self.fp8:
            return keys, values
        by_key, by_value = self._scales
        return self._wide(self._narrow(keys, by_key), by_key), self._wide(self._narrow(values, by_value), by_value)

    def write(self, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows [C, Hkv, D] at the flat rows `at` [C]."""
        for stored, rows, scale in zip(self._stored, (keys, values), self._scales, strict=True):
            if self.fp8:
                stored.view(torch.uint8)[at] = self._narrow(rows, scale).view(torch.uint8)
            else:
                stored[at] = rows

    def read(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [C, Hkv, D] at the flat rows `at` [C], copied."""
        keys, values = (
            self._wide(stored.view(torch.uint8)[at].view(torch.float8_e4m3fn), scale) if self.fp8 else stored[at]
            for stored, scale in zip(self._stored, self._scales, strict=True)
        )
        return keys, values

    @property
    def _scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[Hkv, 1] fp32 of keys and of values."""
        if not self.fp8:
            return None, None
        return self._pool.key_scales[self._layer][:, None], self._pool.value_scales[self._layer][:, None]

    @staticmethod
    def _narrow(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (rows.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def _wide(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (stored.float() * scale).to(self.dtype)


class _PagedFull:
    """A full layer of one sequence."""

    def __init__(self, cache: PagedCache, rows: _Rows) -> None:
        self._cache, self._rows = cache, rows

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows [C, Hkv, D] -> all rows [length + C, Hkv, D]. Takes pages if they were not reserved; CacheFull."""
        self._cache.reserve(keys.shape[0])
        end = self._cache.length + keys.shape[0]
        at = self._cache._rows_of("pages")[:end]
        self._rows.write(at[self._cache.length :], keys, values)
        return self._rows.read(at)

    def commit(self) -> None:
        """Nothing is left to do: rows beyond the sequence's length are nobody's, so they could be written at once."""


class _PagedSliding:
    """A sliding layer of one sequence. New rows overwrite old ones, so they are written when the step is kept."""

    def __init__(self, cache: PagedCache, rows: _Rows) -> None:
        self._cache, self._rows = cache, rows
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows [C, Hkv, D] -> the window before them and they, [at most window - 1 + C, Hkv, D]."""
        self._cache._check_held()
        if self not in self._cache._unwritten:
            self._cache._unwritten.append(self)
        self._pending = self._rows.round(keys, values)
        length = self._cache.length
        before = range(max(0, length - self._cache.pool.config.sliding_window + 1), length)
        old = self._rows.read(self._at(before))
        return torch.cat([old[0], self._pending[0]]), torch.cat([old[1], self._pending[1]])

    def commit(self) -> None:
        """Write as many of the last rows as the ring is meant to hold; nothing when a kernel wrote them already."""
        if self._pending is None:
            return
        count = self._pending[0].shape[0]
        kept = min(count, self._cache._reach)
        start = self._cache.length + count - kept
        self._rows.write(self._at(range(start, start + kept)), *(rows[count - kept :] for rows in self._pending))
        self._pending = None

    def _at(self, positions: range) -> torch.Tensor:
        rows = self._cache._rows_of("ring")
        return rows[torch.arange(positions.start, positions.stop, device=rows.device) % rows.shape[0]]
