"""Prefill and decode on separate GPUs: how many replicas of each a traffic needs, under which plan, and what it costs.

A request is one prefill of its prompt, a transfer of its KV, and one decode step per output token. The two pools are
sized apart, each with the plan (and, for decode, the batch) that meets its goal at the lowest price. Capacity is
arithmetic on means: a prefill replica serves one prompt at a time, a decode replica a whole batch at the step time of a
full batch and a mean context. `most_utilisation` leaves room for chance; how much is enough is what `fleet` simulates.

What is lost: queueing (see `queueing`, `fleet`), and that a real batch mixes short and long contexts.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import CostError, check_count, check_fraction, check_positive
from gptoss_lab.cost.memory import kv_bytes
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR, TokenPrice
from gptoss_lab.cost.sweep import BATCHES, EP_PLANS, Candidate, sweep

NETWORK_BYTES_PER_SECOND = 50e9
"""An assumption: KV moves between nodes over one network card of 400 Gbit/s per GPU."""
MOST_UTILISATION = 0.8


@dataclass(frozen=True)
class Traffic:
    """Mean requests per second, and mean tokens of a prompt and of an answer."""

    requests_per_second: float
    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        check_positive("requests_per_second", self.requests_per_second)
        check_count("input_tokens", self.input_tokens, least=1)
        check_count("output_tokens", self.output_tokens, least=2)

    @property
    def mean_context(self) -> int:
        """Tokens that a decode step attends to, in the mean over an answer."""
        return self.input_tokens + self.output_tokens // 2


@dataclass(frozen=True)
class Goals:
    """Seconds: the longest prefill (first token without queueing) and the longest time per output token."""

    first_token_seconds: float = 2.0
    seconds_per_token: float = 0.020

    def __post_init__(self) -> None:
        check_positive("first_token_seconds", self.first_token_seconds)
        check_positive("seconds_per_token", self.seconds_per_token)


@dataclass(frozen=True)
class Pool:
    """Replicas of one phase. pass_seconds: one prefill, or one step of a full batch. capacity: requests per second of
    one replica. utilisation: share of it that the traffic uses. usd_per_hour: of the whole pool, busy or idle."""

    phase: str
    plan: Plan
    batch: int
    replicas: int
    pass_seconds: float
    capacity: float
    utilisation: float
    usd_per_hour: float

    @property
    def gpus(self) -> int:
        """GPUs of the pool."""
        return self.replicas * self.plan.world


@dataclass(frozen=True)
class Pools:
    """Both pools for a traffic. transfer_seconds: for the KV of a mean prompt between them."""

    traffic: Traffic
    prefill: Pool
    decode: Pool
    transfer_seconds: float

    @property
    def usd_per_day(self) -> float:
        """Dollars for both pools, 24 hours."""
        return 24 * (self.prefill.usd_per_hour + self.decode.usd_per_hour)

    @property
    def price(self) -> TokenPrice:
        """Dollars per million input and output tokens at this traffic, idle time included."""
        per_hour = 3600 * self.traffic.requests_per_second / 1e6
        return TokenPrice(self.prefill.usd_per_hour / (per_hour * self.traffic.input_tokens),
                          self.decode.usd_per_hour / (per_hour * self.traffic.output_tokens))

    @property
    def usd_per_request(self) -> float:
        """Dollars for one request of mean lengths."""
        return self.price.request_usd(self.traffic.input_tokens, self.traffic.output_tokens)


def size_pools(
    model: PerformanceModel, config: ModelConfig, traffic: Traffic, goals: Goals | None = None,
    plans: Iterable[Plan] = EP_PLANS, batches: Iterable[int] = BATCHES, precision: Precision = FP8_EXPERTS,
    usd_per_gpu_hour: float = USD_PER_GPU_HOUR, most_utilisation: float = MOST_UTILISATION,
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND,
) -> Pools:
    """The cheapest pools that meet the goals. CostError if no plan can, naming the nearest."""
    goals, plans = goals or Goals(), tuple(plans)
    check_fraction("most_utilisation", most_utilisation, above_zero=True)
    common = {"plans": plans, "usd_per_gpu_hour": usd_per_gpu_hour, "precision": precision}
    first = sweep(model, config, "prefill", traffic.input_tokens, batches=(1,), **common)
    steps = sweep(model, config, "decode", traffic.mean_context, batches=batches, **common)
    return Pools(
        traffic,
        _cheapest("prefill", first, goals.first_token_seconds, traffic, usd_per_gpu_hour, most_utilisation),
        _cheapest("decode", steps, goals.seconds_per_token, traffic, usd_per_gpu_hour, most_utilisation),
        kv_bytes(config, traffic.input_tokens, precision.kv) / check_positive(
            "network_bytes_per_second", network_bytes_per_second),
    )


def pool(
    phase: str, candidate: Candidate, traffic: Traffic, usd_per_gpu_hour: float = USD_PER_GPU_HOUR,
    most_utilisation: float = MOST_UTILISATION,
) -> Pool:
    """The fewest replicas of `candidate` that keep their utilisation at or below the limit."""
    passes = 1 if phase == "prefill" else traffic.output_tokens - 1        # the first token comes with the prefill
    capacity = candidate.batch / (candidate.point.step_seconds * passes)
    replicas = math.ceil(traffic.requests_per_second / (capacity * most_utilisation) * (1 - 1e-12))
    return Pool(
        phase, candidate.plan, candidate.batch, replicas, candidate.point.step_seconds, capacity,
        traffic.requests_per_second / (replicas * capacity), replicas * candidate.plan.world * usd_per_gpu_hour,
    )


def _cheapest(
    phase: str, candidates: list[Candidate], limit: float, traffic: Traffic, usd: float, most: float
) -> Pool:
    fitting = [c for c in candidates if c.memory.fits]
    if not fitting:
        raise CostError(f"{phase}: no plan has room for {candidates[0].tokens} tokens; {candidates[-1].memory.reason}")
    enough = [c for c in fitting if c.point.step_seconds <= limit]
    if not enough:
        best = min(fitting, key=lambda c: c.point.step_seconds)
        raise CostError(f"{phase}: no plan takes at most {limit:g} s; {best.plan} is the fastest with "
                        f"{best.point.step_seconds:.3g} s at batch {best.batch}")
    return min((pool(phase, c, traffic, usd, most) for c in enough), key=lambda p: (p.usd_per_hour, p.pass_seconds))
