"""Which proposals stand: the accepted ones, and one token of the model's own, as if it had found them all alone.

Greedy: a proposal stands if it is the model's likeliest token; the first that is not is replaced by the one that is.
No ratio of probabilities has a say, for the draft's probability means nothing when both take the maximum.

Sampled (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318): a proposal x drawn from q stands with
probability min(1, p(x) / q(x)). The first that does not is replaced by a draw from what p has more than q, that is
max(p - q, 0) made to sum to 1. Then x comes out with probability

    q(x) min(1, p(x) / q(x)) + (1 - sum_y min(p(y), q(y))) max(p(x) - q(x), 0) / sum_y max(p(y) - q(y), 0) = p(x),

since both the rest of the mass and the last denominator are 1 - sum_y min(p, q). p and q are what each model would be
drawn from: after temperature, top-k and top-p.

When all stand, one more token comes from the model's last row: it was computed anyway.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_lab.engine.decoders.drawing import named
from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.engine.sampling import check_logits, distributions, invert, uniforms


@dataclass
class Proposal:
    """Tokens proposed to follow one request. drawn_from: for each the distribution [vocab] float64 it was drawn from;
    empty for a greedy request."""

    tokens: list[int]
    drawn_from: list[Tensor]


def extend(requests: Sequence[Request], proposals: Sequence[Proposal], logits: Tensor) -> None:
    """Propose one more token for each request, from its row of the draft's logits [requests, vocab]. LogitsError."""
    places = [len(r.tokens) + len(p.tokens) for r, p in zip(requests, proposals, strict=True)]
    check_logits(logits, [request.index for request in requests], places)
    tokens = logits.argmax(dim=-1)
    rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if rows:
        drawn = distributions(logits[rows], [requests[row].params for row in rows])
        draws = [uniforms(requests[row].params.seed, places[row], 1)[0] for row in rows]
        tokens[rows] = invert(drawn, torch.tensor(draws, dtype=torch.float64, device=logits.device))
        for row, distribution in zip(rows, drawn, strict=True):
            proposals[row].drawn_from.append(distribution)
    for proposal, token in zip(proposals, tokens.tolist(), strict=True):
        proposal.tokens.append(token)


def verify(requests: Sequence[Request], proposals: Sequence[Proposal], logits: Tensor) -> list[list[NewToken]]:
    """The new tokens of each request: its accepted proposals and one more.

    logits: of the model, float, for each request one row after its last token and one after each proposal, all one
    after the other. LogitsError if a row cannot be drawn from.
    """
    counts = [len(proposal.tokens) + 1 for proposal in proposals]
    owners = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
    places = [len(r.tokens) + i for r, count in zip(requests, counts, strict=True) for i in range(count)]
    check_logits(logits, [request.index for request in owners], places)
    best = logits.argmax(dim=-1).tolist()
    found, used, start = [], [], 0
    for request, proposal, count in zip(requests, proposals, counts, strict=True):
        if request.params.temperature == 0:
            found.append(accept_greedy(best[start : start + count], proposal.tokens))
        else:
            found.append(_accept_drawn(request, proposal, logits[start : start + count]))
        used += range(start, start + len(found[-1]))
        start += count
    tokens = torch.tensor([token for own in found for token in own])
    new = iter(named([owners[row] for row in used], tokens, logits[used]))
    return [[next(new) for _ in own] for own in found]


def accept_greedy(best: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """best: the model's likeliest token at each place, one more than `proposed` has. Returns the new tokens."""
    accepted = next((n for n, token in enumerate(proposed) if token != best[n]), len(proposed))
    return list(best[: accepted + 1])


def accept_sampled(
    target: Tensor, proposed: Sequence[int], drawn_from: Sequence[Tensor], draws: Sequence[Sequence[float]]
) -> list[int]:
    """Rejection sampling, see above. Returns the new tokens.

    target: [k + 1, vocab] float64, what the model draws from at each place. proposed: k tokens, each drawn from its
    distribution of drawn_from, [vocab] float64. draws: k + 1 times three numbers in [0, 1), independent of each other:
    the first drew the proposal, or draws the token after the last; the second accepts; the third draws in its place.
    """
    tokens = []
    for token, p, q, (_, accept, replace) in zip(proposed, target, drawn_from, draws, strict=False):
        if accept * q[token] < p[token]:
            tokens.append(token)
            continue
        more = (p - q).clamp(min=0)
        return [*tokens, _invert(more if bool(more.sum() > 0) else p, replace)]
    return [*tokens, _invert(target[len(proposed)], draws[len(proposed)][0])]


def _accept_drawn(request: Request, proposal: Proposal, logits: Tensor) -> list[int]:
    """accept_sampled by the request's own parameters and draws. logits: [k + 1, vocab]."""
    target = distributions(logits, [request.params] * len(logits))
    draws = [uniforms(request.params.seed, len(request.tokens) + n, 3) for n in range(len(logits))]
    return accept_sampled(target, proposal.tokens, proposal.drawn_from, draws)


def _invert(distribution: Tensor, draw: float) -> int:
    return int(invert(distribution[None], torch.tensor([draw], dtype=torch.float64, device=distribution.device)))
