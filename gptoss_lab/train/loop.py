"""One phase of training: batches in, updates out, within a budget of time, logged, saved, and resumed where it stood.

The learning rate follows progress, which is time used over time given (or steps, where they are counted), so a slower
machine does fewer steps of the same schedule instead of an unfinished one: warm-up, a plateau, then a straight line to
zero. Losses stay on the device and are read every few steps, which also keeps the host from running ahead of the clock.

A loss that is not finite does not end the phase: the last good state, kept in memory, comes back, the rates are halved
from there on, and the batches go on where they stood. What had been learned since is lost, the time too. After a few
such falls the phase gives up.
"""
from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from gptoss_lab.train.batches import Batch
from gptoss_lab.train.optimiser import Optimiser
from gptoss_lab.train.settings import Settings

FALLS = 3
"""Times that a phase goes back to its last good state."""


class Log:
    """JSON lines, appended and flushed. file: None keeps them in `rows` only."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []

    def __call__(self, **row: Any) -> None:
        """One line; floats to five significant digits."""
        short = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        self.rows.append(short)
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(short) + "\n")
        print(json.dumps(short), flush=True)


class Trainee(Protocol):
    """What a phase trains."""

    def loss(self, batch: Batch, quantised: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(the loss to be minimised, what to log as scalars on the device)."""

    def state(self) -> dict[str, Any]:
        """What to save."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


@dataclass
class Clock:
    """Progress of a phase. seconds: its budget; steps: a count instead. used, step: so far, of earlier runs too. falls:
    times that the phase went back.
    """

    seconds: float
    steps: int | None = None
    used: float = 0.0
    step: int = 0
    falls: int = 0
    _since: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        """A step was done."""
        now = time.monotonic()
        self.used, self._since, self.step = self.used + now - self._since, now, self.step + 1

    @property
    def progress(self) -> float:
        """0 at the beginning, 1 when the budget is used up."""
        done = self.step / self.steps if self.steps is not None else self.used / max(self.seconds, 1e-9)
        return min(1.0, done)


def rate_factor(clock: Clock, settings: Settings) -> float:
    """Factor on the learning rates: warm-up by steps, plateau, then linear to zero by progress; half after a fall."""
    warm = min(1.0, (clock.step + 1) / settings.warmup)
    return 0.5**clock.falls * warm * min(1.0, (1 - clock.progress) / (1 - settings.decay_from))


def run_phase(
    name: str, trainee: Trainee, optimiser: Optimiser, batches: Iterator[Batch], clock: Clock, settings: Settings,
    log: Log, save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, float]:
    """Train until the clock has run out. Returns the last logged scalars. save: called with the state now and then.

    RuntimeError if the loss was not finite too often, or before there was a good state; what was saved is a good one.
    """
    last: dict[str, float] = {}
    good: dict[str, Any] | None = None
    saved = kept = mark = time.monotonic()
    tokens = 0
    while clock.progress < 1.0:
        batch = next(batches)
        quantised = clock.progress >= settings.quantise_from
        factor = rate_factor(clock, settings)
        loss, scalars = trainee.loss(batch, quantised)
        loss.backward()
        optimiser.step(factor)
        tokens += len(batch.rows)
        clock.tick()
        if clock.step % settings.log_every == 0 or clock.progress >= 1.0:
            last = {key: float(value) for key, value in scalars.items()}
            now = time.monotonic()
            speed, tokens, mark = tokens / max(now - mark, 1e-9), 0, now
            log(phase=name, step=clock.step, seconds=clock.used, progress=clock.progress, rate=factor,
                quantised=quantised, tokens_per_second=speed, **last)
            if not all(map(_finite, last.values())):
                _fall(name, trainee, optimiser, clock, good, last)
                log(phase=name, event="fall", back_to=good["step"], falls=clock.falls)
                continue
            if good is None or now - kept > settings.keep_every:
                good, kept = copy.deepcopy(snapshot(name, trainee, optimiser, clock)), now
            if save is not None and now - saved > settings.save_every:
                save(snapshot(name, trainee, optimiser, clock))
                saved = now
    return last


def snapshot(name: str, trainee: Trainee, optimiser: Optimiser, clock: Clock) -> dict[str, Any]:
    """Everything that is needed to go on with a phase."""
    return {
        "phase": name, "trainee": trainee.state(), "optimiser": optimiser.state_dict(), "used": clock.used,
        "step": clock.step, "falls": clock.falls,
    }


def _fall(
    name: str, trainee: Trainee, optimiser: Optimiser, clock: Clock, good: dict[str, Any] | None, last: dict[str, float]
) -> None:
    """Go back to the good state, with half the rates."""
    if good is None or clock.falls == FALLS:
        raise RuntimeError(f"{name}: step {clock.step} has {last} after {clock.falls} falls; lower the learning rates, "
                           "resume if saved")
    trainee.load(good["trainee"])
    optimiser.load_state_dict(copy.deepcopy(good["optimiser"]))
    clock.falls += 1


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Write the state so that a killed run leaves the old one or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    torch.save(state, part)
    os.replace(part, file)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
