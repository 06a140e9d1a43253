"""What the scheduler did, step by step: a record to look at, to draw and to test.

Each step holds one entry for every sequence that was there, in the batch or waiting, and how many pages were held after
the step's work. Nothing is timed: a step is a step, whatever it took.

    waiting      not in the batch; not admitted yet, or preempted earlier
    prefill      a chunk of its tokens was read; the last chunk finds a token too (after preemption again)
    decode       its newest token was fed, with proposals where the decoder drafts, and one or more were found
    idle         in the batch, but the step had no tokens left for it
    preempted    gave its pages back in this step and waits again
    cancelled    dropped before this step
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("waiting", "prefill", "decode", "idle", "preempted", "cancelled")


@dataclass(frozen=True, slots=True)
class Entry:
    """One sequence in one step.

    read: tokens that its cache holds more than before (proposals that were taken back not counted). found: new tokens.
    finish: None, or how it ended in this step: "stop", "length", "context" or "failed".
    """

    sequence: int
    kind: str
    read: int = 0
    found: int = 0
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step. pages_held: when the step's work was done, those of sequences that end with it included."""

    entries: tuple[Entry, ...]
    pages_held: int
    pages: int

    @property
    def read(self) -> int:
        """Tokens read by all sequences."""
        return sum(entry.read for entry in self.entries)

    @property
    def found(self) -> int:
        """New tokens of all sequences."""
        return sum(entry.found for entry in self.entries)


class Timeline:
    """Records steps; give it to a `Scheduler` or a `Loop`. steps: those so far."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._cancelled: list[int] = []

    def cancelled(self, sequence: int) -> None:
        """A sequence was dropped; the next step will say so."""
        self._cancelled.append(sequence)

    def step(
        self,
        moved: Mapping[int, tuple[bool, int, int, str | None]],
        preempted: Sequence[int],
        waiting: Sequence[int],
        pages: tuple[int, int],
    ) -> None:
        """Note a step. moved: for each sequence of the batch whether it was still reading, the tokens that it read,
        those it found, and how it ended or None. pages: (held, in all)."""
        entries = [
            Entry(sequence, _kind(reading, read, found), read, found, finish)
            for sequence, (reading, read, found, finish) in moved.items()
        ]
        for kind, sequences in (("preempted", preempted), ("waiting", waiting), ("cancelled", self._cancelled)):
            entries += [Entry(sequence, kind) for sequence in sequences]
        self._cancelled = []
        self.steps.append(Step(tuple(entries), *pages))

    @property
    def sequences(self) -> list[int]:
        """All sequences, in the order in which they were first seen."""
        return list(dict.fromkeys(entry.sequence for step in self.steps for entry in step.entries))

    def of(self, sequence: int) -> list[Entry | None]:
        """A sequence's entry in every step, None where it was not there."""
        return [next((e for e in step.entries if e.sequence == sequence), None) for step in self.steps]


def _kind(reading: bool, read: int, found: int) -> str:
    if not read and not found:
        return "idle"
    return "prefill" if reading else "decode"
