"""An engine without a model: it answers with what the user said, again and again. For measuring the front end alone.

Every answer is known beforehand from its own prompt, so a token that is lost, doubled or given to another stream shows.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.engine import Engine, Loop
from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.harmony.ids import CHANNEL, END, MESSAGE
from gptoss_lab.harmony.vocabulary import encode

HEADER = (CHANNEL, *encode("final"), MESSAGE)
"""What every answer begins with."""


class Echo:
    """A decoder: <|channel|>final<|message|>, then the last body of the prompt repeated. interval: seconds a step."""

    def __init__(self, interval: float) -> None:
        self._interval, self._next = interval, 0.0

    def start(self, request: Request) -> None:
        """Find what is to be said: the ids between the last <|message|> and <|end|> of the prompt."""
        prompt = request.tokens
        end = len(prompt) - 1 - prompt[::-1].index(END)
        begin = end - prompt[:end][::-1].index(MESSAGE)
        request.state = iter((*HEADER, *islice(cycle(prompt[begin:end]), request.params.max_new_tokens)))

    def step(self, batch: Sequence[Request]) -> list[list[NewToken]]:
        """One token each, at the pace that was asked for."""
        now = time.monotonic()
        time.sleep(max(0.0, self._next - now))
        self._next = max(now, self._next) + self._interval
        return [[NewToken(next(request.state))] for request in batch]


class _Shape:
    """What the engine asks of a model when the decoder needs none."""

    config: ModelConfig = preset("nano")


def echo_loop(interval: float = 0.05, max_batch: int = 64) -> Loop:
    """Made in the engine's process. interval: seconds between two tokens of a stream."""
    return Loop(Engine(_Shape(), Echo(interval)), max_batch)


def expected(text: str, tokens: int) -> list[int]:
    """The ids of the body of the answer to `text` when it is cut after `tokens` tokens, header included."""
    return list(islice(cycle(encode(text)), max(0, tokens - len(HEADER))))
