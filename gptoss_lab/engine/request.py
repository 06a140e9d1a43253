"""One sequence on its way through the engine: what it has so far, how it is sampled, and when it ends."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gptoss_lab.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewToken:
    """What a decoder found: a token id, and where the request asked for them its log-probability and the likeliest."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One new token of one sequence, in the order in which they were found.

    sequence: index of the prompt. token: id. logprob: natural log of its probability under the model, or None when not
    asked for. finish: None while the sequence goes on; else why this token is its last: "stop" (it is a stop id),
    "length" (max_new_tokens reached) or "context" (no position is left in the model). top: the likeliest tokens at this
    position as (id, log-probability), likeliest first; as many as asked for.
    """

    sequence: int
    token: int
    logprob: float | None = None
    finish: str | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that ended without a last token: its number and why, in one line."""

    sequence: int
    message: str


@dataclass(eq=False)
class Request:
    """A sequence in the batch.

    index: of its prompt. tokens: prompt and answer so far, ids. params: seeded. stop_ids: those in force. room: how
    many new tokens the model's positions leave. state: whatever the decoder keeps for it, its cache in the first place.
    """

    index: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    room: int
    state: Any = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def positions(self) -> int:
        """How many tokens its cache may come to hold; the last new token is never fed back."""
        return self.prompt_length + min(self.room, self.params.max_new_tokens) - 1

    @property
    def left(self) -> int:
        """How many new tokens may still follow, 1 or more before the last."""
        return self.positions + 1 - len(self.tokens)

    def take(self, new: NewToken) -> Event:
        """Append a token and say whether it was the last."""
        self.tokens.append(new.token)
        return Event(self.index, new.token, new.logprob, self._finish(new.token), new.top)

    def _finish(self, token: int) -> str | None:
        if token in self.stop_ids:
            return "stop"
        generated = len(self.tokens) - self.prompt_length
        if generated >= self.params.max_new_tokens:
            return "length"
        return "context" if generated >= self.room else None
