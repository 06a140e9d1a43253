"""The scheduler: which sequences take part in the next step. They come, go and are cancelled between steps.

Continuous batching, first come, first served. Before each step the sequences that wait are admitted in the order of
their arrival, while the batch has a row and memory has room for what they hold now; none overtakes another. Then the
step's memory is taken. When pages run out, the youngest sequence of the batch gives all of its pages back and waits
again, in front of everybody younger; it keeps its tokens, and when it is admitted again they are read like a prompt.
So the oldest sequence always goes on, and whatever is submitted ends. A sequence that could not be held even alone is
refused before it gets here (`Memory.check`).

Why give back everything and read again, instead of copying pages away: reading is prefill, the fastest thing a GPU
does, and the case is rare where admission counts pages. What a sequence yields does not depend on any of it: its draws
are a function of its seed and its positions (sampling.py), and its logits of the batch only as far as arithmetic rounds
differently in another shape. (With a decoder that drafts, which draws decide a sampled token depends on where its
rounds begin: then the distribution is what does not change.)

Logits from which nothing can be drawn end their own sequence only. The decoder gives up such a step half-way, so the
caches of the others are dropped and read again from their tokens: slow, rare, and nothing is lost.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gptoss_lab.engine.decoders import Decoder
from gptoss_lab.engine.errors import LogitsError
from gptoss_lab.engine.memory import memory_of
from gptoss_lab.engine.request import Event, Failure, NewToken, Request
from gptoss_lab.engine.timeline import Timeline
from gptoss_lab.model.paged import CacheFull


class Scheduler:
    """Moves requests through a decoder; whoever calls `step` is the clock.

    decoder: its memory is asked where it is counted. max_batch: sequences in the batch at once, 1 or more.
    max_positions: tokens that the caches of the batch may come to hold together, for a decoder whose memory nobody
    counts, or None. timeline: notes what every request did in every step.
    """

    def __init__(
        self, decoder: Decoder, max_batch: int, max_positions: int | None = None, timeline: Timeline | None = None
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; at least 1 is expected")
        if max_positions is not None and max_positions < 1:
            raise ValueError(f"max_positions is {max_positions}; at least 1, or None, is expected")
        self.decoder, self.max_batch, self.max_positions, self.timeline = decoder, max_batch, max_positions, timeline
        self.memory = memory_of(decoder)
        self.preemptions = 0
        self._waiting: deque[Request] = deque()          # oldest first, all younger than those that run
        self._running: dict[int, Request] = {}           # oldest first
        self._reading: set[int] = set()                  # of those that run, who has not found a token since it joined

    @property
    def waiting(self) -> tuple[int, ...]:
        """The sequences that wait, in the order in which they will be admitted."""
        return tuple(request.index for request in self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """The sequences in the batch, oldest first."""
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a checked request; its first token comes from a later `step`."""
        self._waiting.append(request)

    def cancel(self, sequence: int) -> bool:
        """Drop a sequence and its caches; False when it is not here (any more). No event of it follows."""
        if sequence in self._running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self._waiting = deque(request for request in self._waiting if request.index != sequence)
        else:
            return False
        if self.timeline is not None:
            self.timeline.cancelled(sequence)
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        for sequence in self.running:
            self._leave(sequence)

    def step(self) -> list[Event | Failure]:
        """Admit what there is room for, make room, and move the batch on by one step of the decoder.

        Returns the new tokens in the order of arrival; a sequence's last event has `finish` set or is a `Failure`.
        Empty while prompts are being read, and when idle.
        """
        self._admit()
        preempted = self._reserve()
        batch = list(self._running.values())
        before = {request.index: self.memory.seen(request) for request in batch}
        events = self._run(batch) if batch else []
        if self.timeline is not None:
            self._note(before, preempted, events)
        for event in events:
            self._reading.discard(event.sequence)
            if isinstance(event, Event) and event.finish is not None:
                self._leave(event.sequence)
        return events

    def _admit(self) -> None:
        held = sum(request.positions for request in self._running.values())
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting[0]
            held += request.positions
            if self.max_positions is not None and held > self.max_positions:
                return
            if not self.memory.fits(request, self._running.values()):
                return
            self.decoder.start(request)
            self._running[request.index] = self._waiting.popleft()
            self._reading.add(request.index)

    def _reserve(self) -> list[int]:
        """Take the next step's memory; the youngest make room for it. Returns who did."""
        preempted = []
        while self._running:
            try:
                self.memory.reserve(list(self._running.values()))
                break
            except CacheFull:
                if len(self._running) == 1:
                    raise                                # the pool is held by somebody else
                youngest = self._leave(next(reversed(self._running)))
                self._waiting.appendleft(youngest)
                preempted.append(youngest.index)
        self.preemptions += len(preempted)
        return preempted

    def _run(self, batch: list[Request]) -> list[Event | Failure]:
        try:
            found = self.decoder.step(batch)
        except LogitsError as error:
            return [self._fail(error)]
        return [event for request, new in zip(batch, found, strict=True) for event in _take(request, new)]

    def _fail(self, error: LogitsError) -> Failure:
        """Drop the sequence whose logits were bad, and let the others read their tokens again."""
        if error.sequence not in self._running:
            raise error
        self._leave(error.sequence)
        for request in self._running.values():
            self.memory.stop(request)
            self.decoder.start(request)
        self._reading.update(self._running)
        return Failure(error.sequence, str(error))

    def _leave(self, sequence: int) -> Request:
        request = self._running.pop(sequence)
        self._reading.discard(sequence)
        self.memory.stop(request)
        return request

    def _note(
        self, before: dict[int, int], preempted: Sequence[int], events: Sequence[Event | Failure]
    ) -> None:
        """Tell the timeline what this step was."""
        ends = {e.sequence: "failed" if isinstance(e, Failure) else e.finish for e in events}
        moved = {}
        for sequence, seen in before.items():
            request = self._running.get(sequence)
            found = sum(1 for e in events if e.sequence == sequence and isinstance(e, Event))
            read = 0 if request is None else max(0, self.memory.seen(request) - seen)
            moved[sequence] = (sequence in self._reading, read, found, ends.get(sequence))
        waiting = [sequence for sequence in self.waiting if sequence not in preempted]
        self.timeline.step(moved, preempted, waiting, self.memory.pages())


def _take(request: Request, found: Sequence[NewToken]) -> list[Event]:
    """The events of one sequence's new tokens; those after its last are dropped."""
    events = []
    for new in found:
        events.append(request.take(new))
        if events[-1].finish is not None:
            break
    return events
