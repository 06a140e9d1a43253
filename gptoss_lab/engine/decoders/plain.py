"""The plain decoder: one pass of the model over all new tokens of the batch, one drawn token for each sequence.

Prefill and decode are the same thing here: a sequence feeds the tokens that its cache has not seen, the whole prompt at
first, one token after that. All of them lie one after the other in a single ragged batch. A step takes at most
`step_tokens` of them, sequences in decode first, so a long prompt is read in chunks and does not stop the others.

What is lost: the batch of every step has a new shape, so nothing is captured in graphs.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gptoss_lab.config import ModelConfig
from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.engine.sampling import SamplingParams, check_logits, choose, likeliest, log_probabilities


class Model(Protocol):
    """What the engine needs of a model (`gptoss_lab.model.Transformer` has it)."""

    config: ModelConfig
    device: torch.device

    def new_cache(self, capacity: int) -> Any:
        """An empty cache for one sequence, with room for `capacity` tokens; its `length` is how many it has seen."""

    def __call__(self, token_ids: Tensor, lengths: list[int], caches: list[Any], *, logits: str) -> Tensor | None:
        """One step of a ragged batch; the caches grow by it.

        token_ids: [T] int64, lengths[b] new tokens of each of B sequences, one after the other. logits: "last" returns
        [B, vocab] float, after each sequence's last token; "none" returns None.
        """


class PlainDecoder:
    """One token for each sequence a step.

    model: called as `Model` says. step_tokens: at most so many new tokens go through the model at once, 1 or more.
    """

    def __init__(self, model: Model, step_tokens: int = 8192) -> None:
        if step_tokens < 1:
            raise ValueError(f"step_tokens is {step_tokens}; at least 1 is expected")
        self.model = model
        self.step_tokens = step_tokens

    def start(self, request: Request) -> None:
        """Give the request an empty cache with room for all it may become."""
        request.state = self.model.new_cache(len(request.tokens) + min(request.room, request.params.max_new_tokens))

    def step(self, batch: Sequence[Request]) -> list[list[NewToken]]:
        """One pass of the model; see `Decoder.step`."""
        share = self._share(batch)
        fed = [request for request in batch if share[request]]
        ready = [row for row, request in enumerate(fed) if share[request] == _pending(request)]
        logits = self._forward(fed, [share[request] for request in fed], "last" if ready else "none")
        drawn = self._draw([fed[row] for row in ready], logits[ready]) if ready else []
        found = {fed[row]: new for row, new in zip(ready, drawn, strict=True)}
        return [[found[request]] if request in found else [] for request in batch]

    def _share(self, batch: Sequence[Request]) -> dict[Request, int]:
        """How many new tokens each request feeds in this step: those in decode first, then prompts in order."""
        share, left = {}, self.step_tokens
        for request in sorted(batch, key=lambda r: _pending(r) > 1):
            share[request] = min(left, _pending(request))
            left -= share[request]
        return share

    @torch.inference_mode()
    def _forward(self, fed: list[Request], lengths: list[int], logits: str) -> Tensor | None:
        """[fed, vocab] logits after each request's share; their caches are longer by it afterwards."""
        new = [r.tokens[r.state.length : r.state.length + n] for r, n in zip(fed, lengths, strict=True)]
        ids = torch.tensor([token for tokens in new for token in tokens], device=self.model.device)
        return self.model(ids, lengths, [request.state for request in fed], logits=logits)

    def _draw(self, requests: list[Request], logits: Tensor) -> list[NewToken]:
        """A token for each request from its row of logits [requests, vocab]."""
        positions = [len(request.tokens) for request in requests]
        check_logits(logits, [request.index for request in requests], positions)
        tokens = choose(logits, [request.params for request in requests], positions)
        wanted = [request.params.logprobs or request.params.top_logprobs > 0 for request in requests]
        if not any(wanted):
            return [NewToken(token) for token in tokens.tolist()]
        logprobs = log_probabilities(logits, tokens).tolist()
        found = zip(requests, wanted, tokens.tolist(), logprobs, logits, strict=True)
        return [
            _with_logprobs(token, logprob, row, request.params) if want else NewToken(token)
            for request, want, token, logprob, row in found
        ]


def _with_logprobs(token: int, logprob: float, row: Tensor, params: SamplingParams) -> NewToken:
    """A token with its log-probability and, from its logits `row` [vocab], those of the likeliest."""
    return NewToken(token, logprob, tuple(likeliest(row, params.top_logprobs)) if params.top_logprobs else ())


def _pending(request: Request) -> int:
    """How many of a request's tokens its cache has not seen."""
    return len(request.tokens) - request.state.length
