"""A fleet simulated request by request: prefill replicas, a network, decode replicas that batch.

A request arrives (Poisson), waits for a free prefill replica, is prefilled alone, and has its first token. Its KV moves
to the decode replica with the fewest requests; there it joins the batch, or waits while the batch is full. All requests
of a batch get one token per step, and a step of n requests takes `step_seconds[n - 1]`; who joins slows the others
down. Time is simulated by SimPy from event to event, not step by step: between two events n does not change, so
progress is linear.

What is lost: a step depends on how many are active and on a mean context, not on each one's length; joining happens
between steps in an engine and at once here; no replica fails. Closed forms that must come out are in `queueing`.
"""
from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import simpy

from gptoss_lab.cost.errors import CostError, check_count, check_positive

WARM_UP = 0.1       # share of the first requests that no statistic counts


@dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal with this mean and variation (standard deviation over mean; 0: all the same)."""

    mean: float
    variation: float = 0.0
    least: int = 1
    most: int = 128_000

    def draw(self, rng: np.random.Generator, size: int) -> list[int]:
        """`size` lengths. Cutting at `most` lowers the mean a little where the variation is large."""
        spread = np.sqrt(np.log1p(self.variation**2))
        middle = np.log(check_positive("mean length", self.mean)) - spread**2 / 2
        drawn = np.exp(middle + spread * rng.normal(size=size))
        return np.clip(np.rint(drawn), self.least, self.most).astype(int).tolist()


@dataclass(frozen=True)
class Fleet:
    """What serves. prefill_seconds(tokens), transfer_seconds(tokens): of a prompt. step_seconds: of a decode step by
    number of active requests, from 1 to the largest batch. usd_per_hour: of all replicas together."""

    prefill_replicas: int
    decode_replicas: int
    prefill_seconds: Callable[[int], float]
    step_seconds: Sequence[float]
    transfer_seconds: Callable[[int], float] = lambda tokens: 0.0
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        check_count("prefill_replicas", self.prefill_replicas, least=1)
        check_count("decode_replicas", self.decode_replicas, least=1)
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise CostError("step_seconds needs one time above 0 for every number of active requests")


@dataclass(frozen=True)
class Served:
    """One request: seconds until its prefill began, until its first token, and from there per further token."""

    prefill_wait: float
    first_token: float
    decode_wait: float
    per_token: float


@dataclass(frozen=True)
class Report:
    """What users saw and how busy the fleet was. prefill_busy: share of the replicas' time. decode_fill: active
    requests over the room for them, in the mean. Both are taken over `window_seconds`, from the end of the warm-up to
    the last arrival."""

    served: tuple[Served, ...]
    prefill_busy: float
    decode_fill: float
    window_seconds: float
    usd_per_day: float

    def quantiles(self, what: str, at: Sequence[float] = (0.5, 0.95, 0.99)) -> tuple[float, ...]:
        """Quantiles over the requests of a field of `Served`, in seconds."""
        return tuple(float(q) for q in np.quantile([getattr(s, what) for s in self.served], at))

    def mean(self, what: str) -> float:
        """Mean over the requests of a field of `Served`, in seconds."""
        return float(np.mean([getattr(s, what) for s in self.served]))

    def table(self) -> dict[str, float]:
        """One flat line: p50, p95, p99 of first token and time per token, busy shares, dollars per day."""
        names = ("p50", "p95", "p99")
        first = zip(names, self.quantiles("first_token"), strict=True)
        token = zip(names, self.quantiles("per_token"), strict=True)
        return {**{f"first_token_{n}_s": value for n, value in first}, **{f"per_token_{n}_s": v for n, v in token},
                "prefill_busy": self.prefill_busy, "decode_fill": self.decode_fill, "usd_per_day": self.usd_per_day}


@dataclass(order=True)
class _Active:
    """A request in a batch: done when the replica's progress reaches `until` (tokens per sequence)."""

    until: float
    number: int
    done: Any = field(compare=False)


class DecodeReplica:
    """A batch that shares its steps. `join` waits for a place and returns (yields) when all tokens are made."""

    def __init__(self, env: simpy.Environment, step_seconds: Sequence[float]) -> None:
        self.env, self.steps = env, list(step_seconds)
        self.active: list[_Active] = []
        self.waiting: deque[Any] = deque()
        self.taken = 0                                  # places of the batch that are active or promised
        self.progress, self.area, self.since, self.number = 0.0, 0.0, env.now, count()
        self.changed = env.event()
        env.process(self._run())

    @property
    def present(self) -> int:
        """Requests here, active or waiting."""
        return len(self.active) + len(self.waiting)

    def join(self, tokens: float) -> Iterator[Any]:
        """Process: wait for room, then for `tokens` steps; its value is the seconds it waited."""
        arrived = self.env.now
        if self.taken < len(self.steps):
            self.taken += 1
        else:
            place = self.env.event()
            self.waiting.append(place)
            yield place                                 # of one who left: `taken` stays, nobody can slip in between
        wait = self.env.now - arrived
        self.advance()
        done = self.env.event()
        heapq.heappush(self.active, _Active(self.progress + tokens, next(self.number), done))
        self._wake()
        yield done
        return wait

    def _wake(self) -> None:
        self.changed.succeed()
        self.changed = self.env.event()

    def advance(self) -> None:
        """Bring `progress` (tokens per sequence) and `area` (active requests times seconds) up to now."""
        passed = self.env.now - self.since
        if self.active:
            self.progress += passed / self.steps[len(self.active) - 1]
            self.area += passed * len(self.active)
        self.since = self.env.now

    def _run(self) -> Iterator[Any]:
        while True:
            changed = self.changed
            if not self.active:
                yield changed
                continue
            first = self.active[0]
            left = max(0.0, (first.until - self.progress) * self.steps[len(self.active) - 1])
            finished = self.env.timeout(left)
            yield finished | changed
            self.advance()
            if finished.processed and not changed.triggered:
                self.progress = first.until             # exactly, so that rounding leaves nothing to wait for
                while self.active and self.active[0].until <= self.progress:
                    heapq.heappop(self.active).done.succeed()
                    if self.waiting:
                        self.waiting.popleft().succeed()
                    else:
                        self.taken -= 1


def simulate(
    fleet: Fleet, requests_per_second: float, inputs: Lengths, outputs: Lengths, requests: int = 4000, seed: int = 0,
) -> Report:
    """Serve `requests` Poisson arrivals and report on all but the first tenth.

    outputs: at least 2 tokens each; the first comes with the prefill. One seed, one run.
    """
    check_positive("requests_per_second", requests_per_second)
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / requests_per_second, check_count("requests", requests, least=10))).tolist()
    prompts, answers = inputs.draw(rng, requests), outputs.draw(rng, requests)
    first = int(WARM_UP * requests)
    run = _Run(fleet, (times[first], times[-1]), random.Random(seed))
    run.env.process(run.arrivals(list(zip(times, prompts, answers, strict=True))))
    run.env.process(run.watch())
    run.env.run()
    window = times[-1] - times[first]
    return Report(
        tuple(run.served[number] for number in range(first, requests)), run.busy / (window * fleet.prefill_replicas),
        run.area / (window * fleet.decode_replicas * len(fleet.step_seconds)), window, 24 * fleet.usd_per_hour,
    )


class _Run:
    """One simulation. window: (begin, end) in which busy and area are counted; tie: who decides between equals."""

    def __init__(self, fleet: Fleet, window: tuple[float, float], tie: random.Random) -> None:
        self.env, self.fleet, self.window, self.tie = simpy.Environment(), fleet, window, tie
        self.pool = simpy.Resource(self.env, fleet.prefill_replicas)
        self.decoders = [DecodeReplica(self.env, fleet.step_seconds) for _ in range(fleet.decode_replicas)]
        self.served: dict[int, Served] = {}
        self.busy = self.area = 0.0

    def arrivals(self, requests: list[tuple[float, int, int]]) -> Iterator[Any]:
        """Start every (time, prompt, answer) when its time comes."""
        for number, (time, prompt, answer) in enumerate(requests):
            yield self.env.timeout(max(0.0, time - self.env.now))
            self.env.process(self._request(number, prompt, max(2, answer)))

    def watch(self) -> Iterator[Any]:
        """Sum the decode replicas' area over the window."""
        begin, end = self.window
        yield self.env.timeout(begin)
        before = self._area()
        yield self.env.timeout(end - begin)
        self.area = self._area() - before

    def _request(self, number: int, prompt: int, answer: int) -> Iterator[Any]:
        env, arrived = self.env, self.env.now
        with self.pool.request() as turn:
            yield turn
            begun, seconds = env.now, self.fleet.prefill_seconds(prompt)
            self.busy += max(0.0, min(self.window[1], begun + seconds) - max(self.window[0], begun))
            yield env.timeout(seconds)
        first = env.now
        yield env.timeout(self.fleet.transfer_seconds(prompt))
        fewest = min(replica.present for replica in self.decoders)
        replica = self.tie.choice([r for r in self.decoders if r.present == fewest])
        queued = yield env.process(replica.join(answer - 1))
        self.served[number] = Served(begun - arrived, first - arrived, queued, (env.now - first) / (answer - 1))

    def _area(self) -> float:
        for replica in self.decoders:
            replica.advance()
        return sum(replica.area for replica in self.decoders)
