"""The least time a pass can take: bytes over bandwidth or FLOPs over rate, whichever is larger.

For one part this is the roofline. For a whole pass there are two readings, and both are given. `Bound.seconds`
compares totals: all bytes against all FLOPs against all NVLink bytes, as if the three could run side by side from
start to end. No engine that reads these bytes can beat it. `Bound.sequential_seconds` adds up the parts, each at its
own limit, because one part needs the result of the one before; an engine could beat it only by fetching weights for
the next part during this one. Where every part has the same limit (decode at small batch: memory; long prefill:
FLOPs) the two nearly agree.

What is lost: latency. A launch, a barrier between ranks, the tail of a kernel cost microseconds that no datasheet
lists. And the experts of a small batch are an expectation for uniform routing (`experts`): a run whose tokens agree
on fewer experts reads fewer bytes, and can be faster than this without any contradiction.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import workload
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.parts import Part, forward_parts
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision


@dataclass(frozen=True)
class PartBound:
    """The three times of one part, in seconds on one GPU."""

    part: Part
    memory_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        """Least time of the part: the largest of the three."""
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)

    @property
    def limited_by(self) -> str:
        """'memory', 'compute' or 'link': what the largest of the three times is spent on."""
        return _largest(self.memory_seconds, self.compute_seconds, self.link_seconds)


@dataclass(frozen=True)
class Bound:
    """The bounds of all parts of a pass on one kind of GPU."""

    parts: tuple[PartBound, ...]
    hardware: Hardware

    @property
    def memory_seconds(self) -> float:
        """All weight and KV bytes of one GPU over its bandwidth."""
        return sum(bound.memory_seconds for bound in self.parts)

    @property
    def compute_seconds(self) -> float:
        """All FLOPs of one GPU, each over the rate of the unit used."""
        return sum(bound.compute_seconds for bound in self.parts)

    @property
    def link_seconds(self) -> float:
        """All bytes that one GPU receives over NVLink, over its rate in one direction."""
        return sum(bound.link_seconds for bound in self.parts)

    @property
    def seconds(self) -> float:
        """Least time of the pass: the largest of the three totals."""
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)

    @property
    def sequential_seconds(self) -> float:
        """Sum of the parts' own bounds: the least time if no part overlaps another."""
        return sum(bound.seconds for bound in self.parts)

    @property
    def limited_by(self) -> str:
        """'memory', 'compute' or 'link': which total is the largest."""
        return _largest(self.memory_seconds, self.compute_seconds, self.link_seconds)

    def __getitem__(self, name: str) -> PartBound:
        """The part called `name`; KeyError if there is none."""
        for bound in self.parts:
            if bound.part.name == name:
                return bound
        raise KeyError(f"no part is called {name!r}; there are {', '.join(b.part.name for b in self.parts)}")

    def table(self) -> list[dict[str, Any]]:
        """One row per part: name, unit, FLOP, bytes, seconds, what limits it, share of `sequential_seconds`."""
        return [
            {
                "part": b.part.name, "unit": b.part.unit, "flop": b.part.flop, "weight_bytes": b.part.weight_bytes,
                "kv_bytes": b.part.kv_bytes, "link_bytes": b.part.link_bytes, "seconds": b.seconds,
                "limited_by": b.limited_by, "share": b.seconds / self.sequential_seconds,
            }
            for b in self.parts
        ]


def bound(parts: Iterable[Part], hardware: Hardware = H200) -> Bound:
    """Divide the bytes and FLOPs of `parts` by the rates of `hardware`."""
    return Bound(tuple(_part_bound(part, hardware) for part in parts), hardware)


def prefill_bound(
    config: ModelConfig, tokens: int, batch: int = 1, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200, cached_tokens: int = 0,
) -> Bound:
    """Bound of one prefill of `tokens` new tokens in each of `batch` sequences."""
    return bound(forward_parts(config, workload.prefill(tokens, batch, cached_tokens), precision, plan), hardware)


def decode_bound(
    config: ModelConfig, context_tokens: int, batch: int = 1, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200,
) -> Bound:
    """Bound of one decode step of `batch` sequences (of the whole replica), each attending to `context_tokens`."""
    return bound(forward_parts(config, workload.decode(context_tokens, batch), precision, plan), hardware)


def verify_bound(
    config: ModelConfig, context_tokens: int, draft_tokens: int, batch: int = 1, precision: Precision = FP8_EXPERTS,
    plan: Plan = SINGLE, hardware: Hardware = H200,
) -> Bound:
    """Bound of one step that verifies `draft_tokens` proposed tokens per sequence and samples one more."""
    work = workload.verify(context_tokens, draft_tokens, batch)
    return bound(forward_parts(config, work, precision, plan), hardware)


def _part_bound(part: Part, hardware: Hardware) -> PartBound:
    return PartBound(
        part,
        memory_seconds=part.memory_bytes / hardware.memory_bytes_per_second,
        compute_seconds=part.flop / hardware.flop_per_second(part.unit),
        link_seconds=part.link_bytes / hardware.link_bytes_per_second,
    )


def _largest(memory: float, compute: float, link: float) -> str:
    times = {"memory": memory, "compute": compute, "link": link}
    return max(times, key=lambda name: times[name])
