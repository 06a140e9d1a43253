"""From logits to one token: temperature, top-k, top-p and a draw, as pure functions of tensors.

The order is the usual one: divide the logits by the temperature, keep the k likeliest tokens, then keep the smallest
set of likeliest tokens that together reach p, and draw from what is left. Where two tokens are equally likely the one
with the lower id comes first, so a cut never depends on how a sort happens to break ties. Temperature 0 is greedy.

The draw inverts the cumulative distribution at one uniform number, and that number is a function of the sequence's
seed and of the position to be filled, nothing else. So what a sequence draws does not depend on its neighbours in the
batch, on the step at which it was admitted, or on whether its prompt was read in chunks; a decoder that takes back
drafted tokens draws the same numbers again.

Probabilities are float64: near 1 a float32 running sum moves in steps of 6e-8, more than most of 201,088 tokens have,
so rare tokens could not be drawn. A cut looks at the 1024 likeliest tokens first and sorts the vocabulary only where
they do not suffice, which is where this plain form is slow: a flat distribution with top-p.
"""
from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gptoss_lab.engine.errors import LogitsError, SamplingError

_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are chosen, and when it ends.

    temperature: 0 is greedy, 1 the model's own distribution. top_k: keep that many tokens, 0 keeps all. top_p: in
    (0, 1], 1 keeps all. seed: None takes a fresh one. max_new_tokens: at least 1. stop_ids: token ids that end the
    sequence (and are still returned); None takes the model's own, an empty tuple none. logprobs: return with every
    token its log-probability (natural log) under the model's distribution, before temperature and cuts.
    top_logprobs: and those of so many likeliest tokens, 0 to 20; above 0 it implies logprobs.
    SamplingError names a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _need("temperature", self.temperature, _is_number(self.temperature) and 0 <= self.temperature < math.inf,
              "a finite number of at least 0 (0 is greedy)")
        _need("top_k", self.top_k, _is_whole(self.top_k) and self.top_k >= 0,
              "a whole number of at least 0 (0 keeps all)")
        _need("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _need("seed", self.seed, self.seed is None or (_is_whole(self.seed) and 0 <= self.seed < 2**64),
              "a whole number from 0 to 2**64 - 1, or None")
        _need("max_new_tokens", self.max_new_tokens, _is_whole(self.max_new_tokens) and self.max_new_tokens >= 1,
              "a whole number of at least 1")
        _need("top_logprobs", self.top_logprobs, _is_whole(self.top_logprobs) and 0 <= self.top_logprobs <= 20,
              "a whole number from 0 to 20")
        stops = () if self.stop_ids is None else self.stop_ids
        _need("stop_ids", stops, isinstance(stops, (tuple, list, set)) and all(map(_is_whole, stops)),
              "a tuple of token ids, or None for the model's own,")

    def seeded(self) -> SamplingParams:
        """The same with a seed: its own, or a fresh one from the operating system."""
        if self.seed is not None:
            return self
        return replace(self, seed=int(np.random.SeedSequence().generate_state(1, np.uint64)[0]))


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of a sequence (from 0, over prompt and answer).

    A counter-based generator (Philox) keyed by both, so no state has to be kept, moved or rolled back.
    """
    return uniforms(seed, position, 1)[0]


def uniforms(seed: int, position: int, count: int) -> list[float]:
    """`count` independent numbers in [0, 1) for one position; the first is `uniform`'s.

    A decoder that drafts needs three: one draws the proposal, one accepts it, one draws in its place.
    """
    key = np.array([seed, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count).tolist()


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The distribution to draw from, row by row.

    logits: [rows, vocab], float, each row with a finite maximum. temperature: [rows] float64, above 0. top_k: [rows]
    int64, 0 keeps all. top_p: [rows] float64, 1 keeps all. Returns [rows, vocab] float64; kept tokens sum to 1, others
    are 0.
    """
    wide = logits.double()
    full = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperature[:, None], dim=-1)
    cut = (top_k > 0) | (top_p < 1)
    if not bool(cut.any()):
        return full
    result = full.clone()
    kept = full[cut] * _kept(full[cut], top_k[cut], top_p[cut])
    result[cut] = kept / kept.sum(dim=-1, keepdim=True)
    return result


def _kept(full: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[rows, vocab] bool: the tokens that survive top-k, then top-p, one of which is set; the likeliest always does."""
    ordered = _largest(full, top_k, top_p)
    rank = torch.arange(ordered.shape[-1], device=full.device)
    upto = (ordered * ((rank < top_k[:, None]) | (top_k == 0)[:, None])).cumsum(dim=-1)
    mass = torch.where(top_k > 0, upto[:, -1], 1.0)
    ahead = torch.nn.functional.pad(upto[:, :-1], (1, 0))  # of the tokens before each one
    count = (ahead < (top_p * mass)[:, None]).sum(dim=-1)
    count = torch.where(top_p < 1, count, top_k)
    count = torch.where(top_k > 0, torch.minimum(count, top_k), count).clamp(1, full.shape[-1])
    edge = ordered.gather(-1, count[:, None] - 1)
    above, tied = full > edge, full == edge
    return above | (tied & (tied.cumsum(dim=-1) <= count[:, None] - above.sum(dim=-1, keepdim=True)))


def _largest(full: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[rows, n] the probabilities in falling order, as far as the cuts can reach: the first 1024, or else all."""
    some = full.topk(min(_CANDIDATES, full.shape[-1]), dim=-1).values
    enough = torch.where(top_k > 0, top_k <= some.shape[-1], some.sum(dim=-1) >= top_p)
    return some if bool(enough.all()) else full.sort(dim=-1, descending=True).values


def invert(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's cumulative distribution first exceeds its uniform number.

    distribution: [rows, vocab] float64, non-negative. uniforms: [rows] float64 in [0, 1). Returns [rows] int64; a token
    of probability 0 is never returned, and the share of uniforms that gives a token is its probability.
    """
    cumulative = distribution.cumsum(dim=-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def choose(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """One token for each sequence of a batch.

    logits: [rows, vocab], float, checked. params: one for each row, seeded. positions: the position each row's token
    will fill. Returns [rows] int64 on the CPU. Greedy rows take the likeliest token, the lowest id among equals.
    """
    tokens = logits.argmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if rows:
        drawn = distributions(logits[rows], [params[row] for row in rows])
        draws = [uniform(params[row].seed, positions[row]) for row in rows]
        tokens[rows] = invert(drawn, torch.tensor(draws, dtype=torch.float64, device=logits.device))
    return tokens.cpu()


def distributions(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each row is drawn from: `probabilities` by the row's own parameters, whose temperature is above 0.

    logits: [rows, vocab], float, checked. Returns [rows, vocab] float64.
    """
    device = logits.device
    return probabilities(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
    )


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Natural log of the model's own probability of one token a row.

    logits: [rows, vocab], float. tokens: [rows] int64. Returns [rows] float64.
    """
    wide = logits.double()
    return wide.gather(-1, tokens.to(wide.device)[:, None])[:, 0] - wide.logsumexp(dim=-1)


def likeliest(logits: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of one row and their natural log-probabilities, likeliest first.

    logits: [vocab], float. Of equal ones either may come first.
    """
    wide = logits.double()
    values, ids = wide.topk(min(count, wide.shape[-1]))
    return list(zip(ids.tolist(), (values - wide.logsumexp(dim=-1)).tolist(), strict=True))


def check_logits(logits: Tensor, names: Sequence[int], positions: Sequence[int]) -> None:
    """LogitsError, naming the first bad sequence, unless every row of logits [rows, vocab] can be drawn from.

    One pass: the maximum of a row is NaN if one value is, +inf if one is, -inf if no token is left.
    """
    largest = logits.amax(dim=-1)
    good = torch.isfinite(largest).tolist()
    if all(good):
        return
    row = good.index(False)
    raise LogitsError(
        f"sequence {names[row]}: the largest logit for position {positions[row]} is {float(largest[row])}; "
        "a finite number is expected",
        names[row],
    )


def _need(key: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise SamplingError(f"sampling {key} is {value!r}; {expected} is expected")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
