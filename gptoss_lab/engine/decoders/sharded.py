"""The plain decoder where every rank has its own columns of the logits: tokens are chosen without gathering them.

All ranks of a tensor-parallel group run this with the same requests and come to the same tokens; see
`gptoss_lab.parallel.vocabulary` for what they exchange. The model's collectives must leave the logits in shards
(`full_logits=False`).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss_lab.engine.decoders.cached import Model
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.errors import LogitsError
from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.engine.sampling import uniform
from gptoss_lab.model.paged import PagePool
from gptoss_lab.parallel.vocabulary import VocabularyShards


class ShardedDecoder(PlainDecoder):
    """One token for each sequence a step, from sharded logits.

    model: returns [B, own columns]. shards: which columns, and the group. step_tokens, pool: as for `PlainDecoder`.
    """

    def __init__(
        self, model: Model, shards: VocabularyShards, step_tokens: int = 8192, pool: PagePool | None = None
    ) -> None:
        super().__init__(model, step_tokens, pool)
        self.shards = shards

    def draw(self, requests: Sequence[Request], logits: Tensor) -> list[NewToken]:
        """A token for each request from its row of logits [requests, own columns]."""
        self._check(requests, logits)
        tokens = self._choose(requests, logits)
        wanted = [request.params.logprobs or request.params.top_logprobs > 0 for request in requests]
        if not any(wanted):
            return [NewToken(token) for token in tokens.tolist()]
        total = self.shards.log_sum_exp(logits)
        logprobs = (self.shards.at(logits, tokens) - total).tolist()
        most = max(request.params.top_logprobs for request in requests)
        values, ids = self.shards.top(logits, most) if most else (logits[:, :0], logits[:, :0])
        likeliest = [
            tuple(zip(row_ids, row, strict=True))
            for row, row_ids in zip((values - total[:, None]).tolist(), ids.tolist(), strict=True)
        ]
        found = zip(requests, wanted, tokens.tolist(), logprobs, likeliest, strict=True)
        return [
            NewToken(token, logprob, top[: request.params.top_logprobs]) if want else NewToken(token)
            for request, want, token, logprob, top in found
        ]

    def _choose(self, requests: Sequence[Request], logits: Tensor) -> Tensor:
        tokens = self.shards.argmax(logits)
        rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        if rows:
            params, device = [requests[row].params for row in rows], logits.device
            draws = [uniform(p.seed, len(requests[row].tokens)) for p, row in zip(params, rows, strict=True)]
            tokens[rows] = self.shards.draw(
                logits[rows],
                torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
                torch.tensor([p.top_k for p in params], device=device),
                torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
                torch.tensor(draws, dtype=torch.float64, device=device),
            )
        return tokens.cpu()

    def _check(self, requests: Sequence[Request], logits: Tensor) -> None:
        """LogitsError, on every rank, for the first row from which nothing can be drawn."""
        for request, largest in zip(requests, self.shards.largest(logits).tolist(), strict=True):
            if not torch.isfinite(torch.tensor(largest)):
                raise LogitsError(f"sequence {request.index}: the largest logit for position {len(request.tokens)} is "
                                  f"{largest}; a finite number is expected", request.index)
