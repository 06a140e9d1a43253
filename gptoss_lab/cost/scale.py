"""From one replica to a fleet: how many replicas goals need, what it costs a day, what breaks first as traffic grows.

`pools` gives the arithmetic start: enough replicas for the mean. `size_fleet` adds replicas to whichever pool misses
its p95 goal in the simulation until both hold. `limits` asks of each resource how many times today's traffic it
carries; the smallest number breaks first.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import CostError, check_count, check_positive
from gptoss_lab.cost.fleet import Fleet, Lengths, Report, simulate
from gptoss_lab.cost.memory import kv_bytes, max_sequences
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.pools import MOST_UTILISATION, NETWORK_BYTES_PER_SECOND, Goals, Pools, Traffic, size_pools
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR

MOST_REPLICAS = 400
FRONT_END_CORES = 8
_ROUND = 64             # prompts are prefilled in steps of so many tokens, as far as the simulated time is concerned


@dataclass(frozen=True)
class Scenario:
    """What arrives and what is promised. variation: of both lengths (standard deviation over mean)."""

    traffic: Traffic
    goals: Goals
    variation: float = 1.0

    @property
    def enough_requests(self) -> int:
        """Arrivals to simulate: 2,000, or as many as come during ten mean answers at the slowest speed allowed."""
        stay = self.traffic.output_tokens * self.goals.seconds_per_token
        return max(2000, round(10 * self.traffic.requests_per_second * stay))

    def lengths(self, config: ModelConfig) -> tuple[Lengths, Lengths]:
        """Distributions of prompt and answer; together they fit the model's positions."""
        room = config.max_position_embeddings
        answers = Lengths(self.traffic.output_tokens, self.variation, least=2, most=room // 8)
        return Lengths(self.traffic.input_tokens, self.variation, most=room - room // 8), answers


@dataclass(frozen=True)
class Sized:
    """A fleet that met its goals in the simulation (or the largest one tried), its pools and the report."""

    pools: Pools
    fleet: Fleet
    report: Report
    meets: bool


def build_fleet(
    model: PerformanceModel, config: ModelConfig, pools: Pools, precision: Precision = FP8_EXPERTS,
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND,
) -> Fleet:
    """The pools with the times of `model`: prefill by prompt length, steps by number of active requests."""
    first, steps = model.of("prefill"), model.of("decode")

    @cache
    def rounded(tokens: int) -> float:
        return first.seconds(config, tokens, 1, pools.prefill.plan, precision)

    table = [steps.seconds(config, pools.traffic.mean_context, n, pools.decode.plan, precision)
             for n in range(1, pools.decode.batch + 1)]
    return Fleet(
        pools.prefill.replicas, pools.decode.replicas,
        lambda tokens: rounded(min(config.max_position_embeddings, -(-tokens // _ROUND) * _ROUND)), table,
        lambda tokens: kv_bytes(config, tokens, precision.kv) / network_bytes_per_second,
        pools.prefill.usd_per_hour + pools.decode.usd_per_hour,
    )


def size_fleet(
    model: PerformanceModel, config: ModelConfig, scenario: Scenario, requests: int | None = None,
    seed: int = 0, precision: Precision = FP8_EXPERTS, usd_per_gpu_hour: float = USD_PER_GPU_HOUR,
    most_utilisation: float = MOST_UTILISATION,
) -> Sized:
    """The smallest fleet found whose p95 of first token and of time per token meet the goals.

    Starts from `size_pools` and adds one replica (one in ten, when they are many) to the pool that misses. requests: to
    simulate; by default enough for the fleet to fill several times over.
    """
    traffic, goals = scenario.traffic, scenario.goals
    requests = scenario.enough_requests if requests is None else check_count("requests", requests, least=100)
    pools = size_pools(model, config, traffic, goals, precision=precision, usd_per_gpu_hour=usd_per_gpu_hour,
                       most_utilisation=most_utilisation)
    inputs, outputs = scenario.lengths(config)
    while True:
        fleet = build_fleet(model, config, pools, precision)
        report = simulate(fleet, traffic.requests_per_second, inputs, outputs, requests, seed)
        late = report.quantiles("first_token", (0.95,))[0] > goals.first_token_seconds
        slow = report.quantiles("per_token", (0.95,))[0] > goals.seconds_per_token
        largest = max(pools.prefill.replicas, pools.decode.replicas)
        if not (late or slow) or largest >= MOST_REPLICAS:
            return Sized(pools, fleet, report, not (late or slow))
        pools = grown(pools, "prefill", usd_per_gpu_hour) if late else pools
        pools = grown(pools, "decode", usd_per_gpu_hour) if slow else pools


def grown(pools: Pools, phase: str, usd_per_gpu_hour: float = USD_PER_GPU_HOUR, more: int | None = None) -> Pools:
    """The pools with `more` replicas of a phase (default: one in ten, at least one)."""
    pool = getattr(pools, phase)
    replicas = pool.replicas + (max(1, pool.replicas // 10) if more is None else more)
    used = pool.utilisation * pool.replicas / replicas
    hourly = replicas * pool.plan.world * usd_per_gpu_hour
    return replace(pools, **{phase: replace(pool, replicas=replicas, utilisation=used, usd_per_hour=hourly)})


def limits(
    config: ModelConfig, pools: Pools, precision: Precision = FP8_EXPERTS,
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND, front_end_seconds_per_token: float | None = None,
    front_end_cores: int = FRONT_END_CORES,
) -> dict[str, float]:
    """How many times the traffic of `pools` each resource carries before it is full, the smallest first.

    front_end_seconds_per_token: CPU time of the JSON API per output token (`front_end_seconds`), None to leave it out.
    """
    traffic = pools.traffic
    rate = traffic.requests_per_second
    room = max_sequences(config, traffic.input_tokens + traffic.output_tokens, precision, pools.decode.plan)
    at_once = rate * (traffic.output_tokens - 1) * pools.decode.pass_seconds             # Little's law, full batches
    moved = rate * kv_bytes(config, traffic.input_tokens, precision.kv)
    found = {
        "prefill replicas": 1 / pools.prefill.utilisation,
        "decode replicas": 1 / pools.decode.utilisation,
        "KV memory of decode": pools.decode.replicas * room / at_once,
        "network between the pools": pools.prefill.gpus * network_bytes_per_second / moved,
    }
    if front_end_seconds_per_token is not None:
        check_positive("front_end_seconds_per_token", front_end_seconds_per_token)
        found[f"front end, {front_end_cores} cores"] = front_end_cores / (
            rate * traffic.output_tokens * front_end_seconds_per_token)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def front_end_seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """CPU seconds of the JSON API per output token, from the recorded serve rows. CostError if there is none."""
    found = [row["value"] for row in rows if row["suite"] == "serve" and row["metric"] == "microseconds"
             and "front end CPU per token" in row["case"] and row["value"]]
    if not found:
        raise CostError("no row of the front end's CPU time per token has been measured yet")
    return found[-1] * 1e-6


def under_growth(
    model: PerformanceModel, config: ModelConfig, scenario: Scenario, pools: Pools, factors: Iterable[float],
    requests: int = 4000, seed: int = 0, precision: Precision = FP8_EXPERTS,
) -> dict[float, Report]:
    """The same fleet under `factor` times its traffic: what users see as it is overrun."""
    fleet = build_fleet(model, config, pools, precision)
    inputs, outputs = scenario.lengths(config)
    rate = scenario.traffic.requests_per_second
    return {factor: simulate(fleet, factor * rate, inputs, outputs, requests, seed) for factor in factors}
