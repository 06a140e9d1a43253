"""Continuous batching for whoever has prompts coming in: checks them, queues them, and moves the batch on.

    loop = Loop(engine, max_batch=64)
    loop.submit(7, prompt, SamplingParams(temperature=0))
    while not loop.idle:
        for event in loop.step(): ...            # Event(7, token, ...), or Failure(7, message)

Sequences come, go and are cancelled between the steps; scheduler.py says who runs when. A long prompt is read in chunks
by the decoder, those in decode first, so it holds up nobody. With a page pool (the decoder's `pool`) a sequence holds
the pages it has filled, and the youngest makes room when they run out; `max_positions`, for caches that grow by
themselves, counts for each sequence all that it may become, from the start.
"""
from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.engine.engine import DEFAULT, Engine
from gptoss_lab.engine.errors import PromptError
from gptoss_lab.engine.request import Event, Failure
from gptoss_lab.engine.sampling import SamplingParams
from gptoss_lab.engine.scheduler import Scheduler
from gptoss_lab.engine.timeline import Timeline


class Loop:
    """Runs sequences on an engine, step by step; whoever calls `step` is the clock.

    max_batch: sequences in the batch at once, 1 or more. max_positions: tokens that the caches of the batch may come to
    hold together, prompts and answers; None for no limit but the model's own length and the decoder's pool. timeline:
    records every step.
    """

    def __init__(
        self, engine: Engine, max_batch: int = 64, max_positions: int | None = None, timeline: Timeline | None = None
    ) -> None:
        self.engine, self.max_positions = engine, max_positions
        self.scheduler = Scheduler(engine.decoder, max_batch, max_positions, timeline)

    @property
    def waiting(self) -> int:
        """How many sequences have not been admitted yet, or wait again."""
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        """How many sequences are in the batch."""
        return len(self.scheduler.running)

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return self.scheduler.idle

    def submit(self, sequence: int, prompt: Sequence[int], params: SamplingParams = DEFAULT) -> None:
        """Queue a sequence; its first token comes from a later `step`.

        sequence: a number that no unfinished sequence has; events carry it. prompt, params: as for `Engine.generate`.
        PromptError: also when it could never be admitted. SamplingError. Nothing is queued then.
        """
        if sequence in self.scheduler.running or sequence in self.scheduler.waiting:
            raise PromptError(f"sequence {sequence} is still running; each needs a number of its own")
        request = self.engine.request(sequence, prompt, params)
        if self.max_positions is not None and request.positions > self.max_positions:
            raise PromptError(
                f"prompt {sequence} may come to hold {request.positions} positions; the caches have "
                f"{self.max_positions} in all: shorten it or ask for fewer new tokens"
            )
        self.scheduler.add(request)

    def cancel(self, sequence: int) -> bool:
        """Drop a sequence and its cache; False when it is not here (any more). No event of it follows."""
        return self.scheduler.cancel(sequence)

    def step(self) -> list[Event | Failure]:
        """Admit what there is room for, and move the batch on by one step of the decoder.

        Returns the new tokens in the order of arrival; a sequence's last event has `finish` set or is a `Failure`.
        Empty while prompts are being read, and when idle.
        """
        return self.scheduler.step()
