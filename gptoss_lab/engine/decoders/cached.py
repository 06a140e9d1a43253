"""What the decoders share: each request's caches, the tokens of a step, and reading them in one ragged batch.

Prefill and decode are one thing: a sequence feeds the tokens that its cache has not seen, the whole prompt at first,
one token after that. All of them lie one after the other in one ragged batch. A step takes at most `step_tokens` of
them, sequences in decode first, so a long prompt is read in chunks and does not hold up the others.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gptoss_lab.config import ModelConfig
from gptoss_lab.engine.decoders.drawing import draw
from gptoss_lab.engine.memory import Caches
from gptoss_lab.engine.request import NewToken, Request


class Model(Protocol):
    """What the engine needs of a model (`gptoss_lab.model.Transformer` has it)."""

    config: ModelConfig
    device: torch.device

    def new_cache(self, capacity: int) -> Any:
        """An empty cache for one sequence, with room for `capacity` tokens; its `length` is how many it has seen."""

    def __call__(self, token_ids: Tensor, lengths: list[int], caches: list[Any], *, logits: str) -> Tensor | None:
        """One step of a ragged batch; the caches grow by it.

        token_ids: [T] int64, lengths[b] new tokens of each of B sequences, one after the other. logits: "last" returns
        [B, vocab] float, after each sequence's last token; "all" [T, vocab]; "none" returns None.
        """


@dataclass
class Held:
    """A request's state. caches: one for each model of the decoder, the target's first. hidden: [H], see mtp.py."""

    caches: list[Any]
    hidden: Tensor | None = None


class CachedDecoder:
    """Base of the decoders that run models; also their `Memory` (engine/memory.py).

    sources: where the caches come from, one for each model, the target's first. step_tokens: at most so many new tokens
    go through the target at once, 1 or more. ValueError.
    """

    draft_tokens = 0
    """Tokens that one step may propose for a sequence in decode."""

    def __init__(self, sources: Sequence[Caches], step_tokens: int) -> None:
        if step_tokens < 1:
            raise ValueError(f"step_tokens is {step_tokens}; at least 1 is expected")
        self.sources, self.step_tokens = list(sources), step_tokens
        self.model: Model = self.sources[0].model

    def start(self, request: Request) -> None:
        """Give the request empty caches with room for all it may become. CacheFull, and nothing is held then."""
        held = Held([])
        request.state = held
        try:
            for source in self.sources:
                held.caches.append(source.new(request.positions + 1))
        except Exception:
            self.stop(request)
            raise

    def stop(self, request: Request) -> None:
        """Give its caches back."""
        if request.state is not None:
            for source, cache in zip(self.sources, request.state.caches, strict=False):
                source.release(cache)
            request.state = None

    def check(self, request: Request) -> None:
        """PromptError if one of the pools is too small for the request even alone."""
        for source in self.sources:
            source.check(request)

    def fits(self, request: Request, batch: Iterable[Request]) -> bool:
        """Whether its tokens so far and a step of decode fit, when all in `batch` have read theirs and made theirs."""
        return all(
            source.fits(self._soon(request), ((other.state.caches[n], self._soon(other)) for other in batch))
            for n, source in enumerate(self.sources)
        )

    def reserve(self, batch: Sequence[Request]) -> None:
        """Take the pages that the next step of `batch` needs. CacheFull; what was taken stays with its requests."""
        for request, share in self.shares(batch).items():
            for source, cache in zip(self.sources, request.state.caches, strict=True):
                source.reserve(cache, self.seen(request) + share)

    def seen(self, request: Request) -> int:
        """How many tokens the target's cache holds."""
        return request.state.caches[0].length

    def pages(self) -> tuple[int, int]:
        """(pages held, pages in all), all models together."""
        held, there = zip(*(source.pages() for source in self.sources), strict=True)
        return sum(held), sum(there)

    def shares(self, batch: Sequence[Request]) -> dict[Request, int]:
        """How many positions each request feeds in the next step: those in decode first, then prompts in order."""
        share, left = {}, self.step_tokens
        for request in sorted(batch, key=lambda r: self.pending(r) > 1):
            share[request] = min(left, self.wanted(request))
            left -= share[request]
        return share

    def pending(self, request: Request) -> int:
        """How many of a request's tokens the target has not seen."""
        return len(request.tokens) - self.seen(request)

    def wanted(self, request: Request) -> int:
        """How many positions it would feed if a step had no limit."""
        return self.pending(request)

    def read(self, batch: Sequence[Request], share: dict[Request, int]) -> dict[Request, NewToken]:
        """One pass of the target over each request's share of its tokens; a token for those that have no more."""
        fed = [request for request in batch if share[request]]
        ready = [row for row, request in enumerate(fed) if share[request] == self.pending(request)]
        if not fed:
            return {}
        new = [r.tokens[self.seen(r) : self.seen(r) + share[r]] for r in fed]
        logits = self.forward(fed, new, "last" if ready else "none")
        if not ready:
            return {}
        requests = [fed[row] for row in ready]
        return dict(zip(requests, self.draw(requests, logits[ready]), strict=True))

    def draw(self, requests: Sequence[Request], logits: Tensor) -> list[NewToken]:
        """The next token of each request from its row of logits [requests, vocab]. LogitsError."""
        return draw(requests, logits)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request], new: Sequence[Sequence[int]], logits: str, model: int = 0) -> Any:
        """Feed new tokens to one of the decoder's models, 0 the target. Returns what the model does."""
        runs = self.sources[model].model
        ids = torch.tensor([token for tokens in new for token in tokens], device=runs.device)
        return runs(ids, [len(tokens) for tokens in new], [r.state.caches[model] for r in requests], logits=logits)

    def _soon(self, request: Request) -> int:
        """Positions that the request needs to read what it has and to make one step of decode."""
        return min(len(request.tokens) + self.draft_tokens, request.positions)
