"""Continuous batching: sequences come, go and are cancelled between the steps of one batch.

    loop = Loop(engine, max_batch=64)
    loop.submit(7, prompt, SamplingParams(temperature=0))
    while not loop.idle:
        for event in loop.step(): ...            # Event(7, token, ...), or Failure(7, message)

Waiting sequences are admitted first come, first served, while the batch has a row and the caches have positions left
for all that they may become. A long prompt is read in chunks by the decoder, those in decode first, so it holds up
nobody. What a sequence yields does not depend on when it came or beside whom: its draws are a function of its seed and
its positions (sampling.py), and its logits of the batch only as far as arithmetic rounds differently in another shape.

Logits from which nothing can be drawn end their own sequence only. The decoder gives up such a step half-way, so the
caches of the others are dropped and read again from their tokens: slow, rare, and nothing is lost.
What is lost: nobody is pre-empted; a sequence that may become long holds its positions from the start.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gptoss_lab.engine.engine import DEFAULT, Engine
from gptoss_lab.engine.errors import LogitsError, PromptError
from gptoss_lab.engine.request import Event, NewToken, Request
from gptoss_lab.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that ended without a last token: its number and why, in one line."""

    sequence: int
    message: str


class Loop:
    """Runs sequences on an engine, step by step; whoever calls `step` is the clock.

    max_batch: sequences in the batch at once, 1 or more. max_positions: tokens that the caches of the batch may come to
    hold together, prompts and answers; None for no limit but the model's own length.
    """

    def __init__(self, engine: Engine, max_batch: int = 64, max_positions: int | None = None) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; at least 1 is expected")
        if max_positions is not None and max_positions < 1:
            raise ValueError(f"max_positions is {max_positions}; at least 1, or None, is expected")
        self.engine, self.max_batch, self.max_positions = engine, max_batch, max_positions
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}

    @property
    def waiting(self) -> int:
        """How many sequences have not been admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many sequences are in the batch."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._running or self._waiting)

    def submit(self, sequence: int, prompt: Sequence[int], params: SamplingParams = DEFAULT) -> None:
        """Queue a sequence; its first token comes from a later `step`.

        sequence: a number that no unfinished sequence has; events carry it. prompt, params: as for `Engine.generate`.
        PromptError: also when it could never be admitted. SamplingError. Nothing is queued then.
        """
        if sequence in self._running or any(sequence == request.index for request in self._waiting):
            raise PromptError(f"sequence {sequence} is still running; each needs a number of its own")
        request = self.engine.request(sequence, prompt, params)
        if self.max_positions is not None and _positions(request) > self.max_positions:
            raise PromptError(
                f"prompt {sequence} may come to hold {_positions(request)} positions; the caches have "
                f"{self.max_positions} in all: shorten it or ask for fewer new tokens"
            )
        self._waiting.append(request)

    def cancel(self, sequence: int) -> bool:
        """Drop a sequence and its cache; False when it is not here (any more). No event of it follows."""
        if self._running.pop(sequence, None) is not None:
            return True
        kept = [request for request in self._waiting if request.index != sequence]
        dropped = len(kept) < len(self._waiting)
        self._waiting = deque(kept)
        return dropped

    def step(self) -> list[Event | Failure]:
        """Admit what there is room for, and move the batch on by one step of the decoder.

        Returns the new tokens in the order of admission; a sequence's last event has `finish` set or is a `Failure`.
        Empty while prompts are being read, and when idle.
        """
        self._admit()
        batch = list(self._running.values())
        if not batch:
            return []
        try:
            found = self.engine.decoder.step(batch)
        except LogitsError as error:
            return [self._fail(error)]
        return [event for request, new in zip(batch, found, strict=True) for event in self._take(request, new)]

    def _admit(self) -> None:
        held = sum(_positions(request) for request in self._running.values())
        while self._waiting and len(self._running) < self.max_batch:
            held += _positions(self._waiting[0])
            if self.max_positions is not None and held > self.max_positions:
                return
            request = self._waiting.popleft()
            self.engine.decoder.start(request)
            self._running[request.index] = request

    def _take(self, request: Request, found: Sequence[NewToken]) -> list[Event]:
        """The events of one sequence's new tokens; those after its last are dropped."""
        events = []
        for new in found:
            events.append(request.take(new))
            if events[-1].finish is not None:
                del self._running[request.index]
                break
        return events

    def _fail(self, error: LogitsError) -> Failure:
        """Drop the sequence whose logits were bad, and let the others read their tokens again."""
        if error.sequence not in self._running:
            raise error
        del self._running[error.sequence]
        for request in self._running.values():
            self.engine.decoder.start(request)
        return Failure(error.sequence, str(error))


def _positions(request: Request) -> int:
    """How many tokens a sequence's cache may come to hold; the last new token is never fed back."""
    return request.prompt_length + min(request.room, request.params.max_new_tokens) - 1
