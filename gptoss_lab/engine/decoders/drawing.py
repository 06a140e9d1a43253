"""From rows of logits to new tokens, with log-probabilities where they were asked for."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.engine.sampling import check_logits, choose, likeliest, log_probabilities


def draw(requests: Sequence[Request], logits: Tensor) -> list[NewToken]:
    """The next token of each request, drawn from its row of logits [requests, vocab]. LogitsError."""
    positions = [len(request.tokens) for request in requests]
    check_logits(logits, [request.index for request in requests], positions)
    tokens = choose(logits, [request.params for request in requests], positions)
    return named(requests, tokens, logits)


def named(requests: Sequence[Request], tokens: Tensor, logits: Tensor) -> list[NewToken]:
    """Tokens [rows] int64 with their log-probabilities under logits [rows, vocab], where row's request wants them."""
    wanted = [request.params.logprobs or request.params.top_logprobs > 0 for request in requests]
    if not any(wanted):
        return [NewToken(token) for token in tokens.tolist()]
    logprobs = log_probabilities(logits, tokens).tolist()
    found = zip(requests, wanted, tokens.tolist(), logprobs, logits, strict=True)
    return [
        NewToken(token, logprob, _likeliest(row, request.params.top_logprobs)) if want else NewToken(token)
        for request, want, token, logprob, row in found
    ]


def _likeliest(row: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Of logits [vocab], the `count` likeliest tokens as (id, log-probability)."""
    return tuple(likeliest(row, count)) if count else ()
