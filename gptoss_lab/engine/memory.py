"""What the scheduler asks about memory: may a sequence ever be held, is there room for it now, take it, give it back.

A decoder whose caches lie in page pools answers these itself (decoders/cached.py). One that keeps nothing, or whose
memory nobody counts, is stood in for by `Unbounded`: everything fits, always.

A decoder that drafts holds several caches for a sequence, of several models; `Caches` is where those of one model come
from: a page pool, or the model itself (each cache then grows by itself).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from gptoss_lab.config import ModelConfig
from gptoss_lab.engine.errors import PromptError
from gptoss_lab.engine.request import Request
from gptoss_lab.model import Transformer
from gptoss_lab.model.paged import PagePool, ring_pages


@runtime_checkable
class Memory(Protocol):
    """The memory of a decoder, asked by the scheduler between steps."""

    def check(self, request: Request) -> None:
        """PromptError, with the numbers, if the request could not be held even alone."""

    def fits(self, request: Request, batch: Iterable[Request]) -> bool:
        """Whether the request's tokens so far find room now, beside what `batch` holds and has still to read."""

    def reserve(self, batch: Sequence[Request]) -> None:
        """Take what the next step of `batch` needs. CacheFull if there is not enough; some may have been taken then."""

    def stop(self, request: Request) -> None:
        """Give back all that `start` and `reserve` took for a request."""

    def seen(self, request: Request) -> int:
        """How many of the request's tokens have been read."""

    def pages(self) -> tuple[int, int]:
        """(pages held, pages in all)."""


class Unbounded:
    """For a decoder whose memory is not counted."""

    def check(self, request: Request) -> None:
        """Everything can be held."""

    def fits(self, request: Request, batch: Iterable[Request]) -> bool:
        """Always."""
        return True

    def reserve(self, batch: Sequence[Request]) -> None:
        """Nothing to take."""

    def stop(self, request: Request) -> None:
        """Forget the request's state."""
        request.state = None

    def seen(self, request: Request) -> int:
        """All but the last, as in decode."""
        return len(request.tokens) - 1

    def pages(self) -> tuple[int, int]:
        """There are none."""
        return 0, 0


def memory_of(decoder: object) -> Memory:
    """The decoder itself where it answers for its memory, else `Unbounded`."""
    return decoder if isinstance(decoder, Memory) else Unbounded()


class Caches:
    """Where the caches of one model come from.

    model: has `new_cache(capacity)`, and `new_cache(capacity, draft)` if draft is not 0. pool: its pages; None takes
    the model's own `pool` if it has one, and else caches that grow. draft: tokens that may have to be taken back.
    ValueError if the pool's rings keep fewer.
    """

    def __init__(self, model: Any, pool: PagePool | None = None, draft: int = 0) -> None:
        pool = getattr(model, "pool", None) if pool is None else pool
        if pool is not None and pool.draft < draft:
            raise ValueError(f"the pool's rings keep {pool.draft} positions more than the window; a draft of {draft} "
                             f"needs draft={draft}")
        self.model, self.pool, self.draft = model, pool, draft

    def new(self, positions: int) -> Any:
        """An empty cache for one sequence that may come to hold so many positions. CacheFull if there is no ring."""
        if self.pool is not None:
            return self.pool.new_cache()
        return self.model.new_cache(positions, self.draft) if self.draft else self.model.new_cache(positions)

    def check(self, request: Request) -> None:
        """PromptError if the whole pool is too small for what the request may become."""
        if self.pool is None:
            return
        needed, there = self.pool.pages_for(request.positions), self.pool.pages - 1
        if needed > there:
            raise PromptError(
                f"prompt {request.index} may come to hold {request.positions} positions, {needed} pages of "
                f"{self.pool.page_size}; the caches have {there} pages in all: shorten it or ask for fewer new tokens"
            )

    def fits(self, positions: int, others: Iterable[tuple[Any, int]]) -> bool:
        """Whether a new cache of so many positions fits, when each (cache, positions) of `others` has grown to its."""
        if self.pool is None:
            return True
        promised = sum(max(0, self.pool.pages_for(n) - len(cache.pages)) for cache, n in others)
        return self.pool.free_rings > 0 and self.pool.pages_for(positions) + promised <= self.pool.free_pages

    def reserve(self, cache: Any, positions: int) -> None:
        """Take pages so that a cache can grow to so many positions. CacheFull."""
        if self.pool is not None:
            cache.reserve(max(0, positions - cache.length))

    def release(self, cache: Any) -> None:
        """Give a cache back."""
        if self.pool is not None:
            cache.release()

    def pages(self) -> tuple[int, int]:
        """(pages held, pages in all)."""
        return (0, 0) if self.pool is None else (self.pool.pages - 1 - self.pool.free_pages, self.pool.pages - 1)


def pool_for(
    model: Transformer, positions: int, sequences: int, *, page_size: int = 64, draft: int = 0, kv_form: str = "same"
) -> PagePool:
    """A pool on the model's device for `sequences` at once that together hold up to `positions` tokens.

    Whole pages are taken, so sequences that end within a page hold a little less. Others: see `PagePool`.
    """
    return PagePool(
        model.config, pages=-(-positions // page_size) + 1, rings=sequences + 1, page_size=page_size, draft=draft,
        dtype=model.dtype, device=model.device, kv_heads=model.layers[0].attention.split[1], kv_form=kv_form,
    )


def positions_in(
    memory: int, config: ModelConfig, sequences: int, *, page_size: int = 64, draft: int = 0, value_bytes: int = 2,
    kv_heads: int | None = None,
) -> int:
    """How many positions a pool for `sequences` can have in so many bytes, rings and the two spare pages included; 0
    or more, a multiple of page_size. value_bytes: of one number, 2 for bf16 and 1 for e4m3."""
    row = 2 * (config.num_kv_heads if kv_heads is None else kv_heads) * config.head_dim * value_bytes
    sliding = sum(config.is_sliding(n) for n in range(config.num_layers))
    ring = ring_pages(config.sliding_window, page_size, draft) * page_size * row * sliding
    page = page_size * row * (config.num_layers - sliding)
    return max(0, (memory - (sequences + 1) * ring) // page - 1) * page_size
