"""What goes between the front end and the engine's process: small messages that are pickled, one for each step."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gptoss_lab.engine import SamplingParams


class Token(NamedTuple):
    """One new token of request `number`. The rest as in `engine.Event`."""

    number: int
    token: int
    logprob: float | None
    finish: str | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: a new request."""

    number: int
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine: nobody wants the rest of this request."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """To the engine: end the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine: it takes requests. vocabulary: number of ids; positions: the longest sequence."""

    vocabulary: int
    positions: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """From the engine: what one step found."""

    found: list[Token]


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: a request that ends without a last token. bad_request: whether what was asked is at fault."""

    number: int
    message: str
    bad_request: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """From the engine, its last word: why it cannot go on."""

    message: str
