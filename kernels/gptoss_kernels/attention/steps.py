"""The online softmax with a sink, one row in fp64, as something to look at: states, splits, and a wrong merge.

No kernel uses these functions. They are the derivation in code: the sink is a virtual key, seen first, whose logit is
s and whose value is zero; a state (m, den, acc) holds the largest logit so far, the sum of exp(logit - m) and the sum
of exp(logit - m) * value. After the virtual key alone it is (s, 1, 0).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PLACES = ("first split", "virtual split", "merge", "every split")
"""Where the sink enters under split-KV. The first three count it once and are equal; the last counts it per split."""


@dataclass(frozen=True)
class State:
    """Running maximum m, denominator den and unnormalised output acc of one row."""

    m: float = -math.inf
    den: float = 0.0
    acc: float = 0.0

    @property
    def out(self) -> float:
        """acc / den, or 0 if nothing was seen."""
        return self.acc / self.den if self.den > 0 else 0.0

    @property
    def lse(self) -> float:
        """log of the denominator, -inf if nothing was seen."""
        return self.m + math.log(self.den) if self.den > 0 else -math.inf


def sink_state(sink: float) -> State:
    """The state after the virtual key: (s, 1, 0); empty for a sink of -inf."""
    return State() if sink == -math.inf else State(sink, 1.0, 0.0)


def merge(a: State, b: State) -> State:
    """The state of both sets of keys together; the order does not matter."""
    m = max(a.m, b.m)
    if m == -math.inf:
        return State()
    fa, fb = math.exp(a.m - m), math.exp(b.m - m)
    return State(m, a.den * fa + b.den * fb, a.acc * fa + b.acc * fb)


def block_state(logits: Sequence[float], values: Sequence[float]) -> State:
    """The state of a block of keys by itself."""
    if not logits:
        return State()
    m = max(logits)
    weights = [math.exp(z - m) for z in logits]
    return State(m, sum(weights), sum(w * v for w, v in zip(weights, values, strict=True)))


def online_softmax(logits: Sequence[float], values: Sequence[float], sink: float, block: int) -> list[State]:
    """The states of a kernel that walks the keys in blocks: before the first, then after each; the last holds `out`.

    logits, values: one number per key. sink: natural-log units, -inf for none. block: keys per step, at least 1.
    """
    if block < 1:
        raise ValueError(f"block is {block}; at least one key per step is needed")
    states = [sink_state(sink)]
    for n in range(0, len(logits), block):
        states.append(merge(states[-1], block_state(logits[n : n + block], values[n : n + block])))
    return states


def split_attention(
    logits: Sequence[float], values: Sequence[float], sink: float, cuts: Sequence[int], place: str = "first split"
) -> float:
    """The output when the keys are cut into splits at `cuts` and merged, with the sink entering at `place`.

    cuts: rising positions from 0 to the number of keys; equal ones give an empty split. place: one of PLACES.
    """
    if place not in PLACES:
        raise ValueError(f"place is {place!r}; one of {', '.join(PLACES)} is needed")
    edges = [0, *cuts, len(logits)]
    if any(b < a for a, b in pairwise(edges)):
        raise ValueError(f"cuts are {list(cuts)}; rising positions from 0 to {len(logits)} are needed")
    parts = [block_state(logits[a:b], values[a:b]) for a, b in pairwise(edges)]
    if place == "every split":
        parts = [merge(sink_state(sink), part) for part in parts]
    elif place == "first split":
        parts[0] = merge(sink_state(sink), parts[0])
    elif place == "virtual split":
        parts.append(sink_state(sink))
    total = State()
    for part in parts:
        total = merge(total, part)
    if place != "merge":
        return total.out
    return total.out / (1.0 + math.exp(sink - total.lse)) if total.den > 0 else 0.0


def sink_mass(logits: Sequence[float], sink: float) -> float:
    """The share of the softmax that the sink takes, and the keys do not get: between 0 and 1."""
    keys = block_state(logits, [0.0] * len(logits))
    return math.exp(sink - merge(sink_state(sink), keys).lse) if sink != -math.inf else 0.0
