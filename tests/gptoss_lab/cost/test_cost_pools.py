"""Pools: capacity by hand, the cheapest plan that meets its goal, prices linear in what they depend on."""
import math
from dataclasses import replace

import pytest
from cost_truth import recorded_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import CostError, Plan, kv_bytes
from gptoss_lab.cost.performance import kernels_alone
from gptoss_lab.cost.pools import Goals, Traffic, pool, size_pools
from gptoss_lab.cost.sweep import sweep

BIG, SMALL = preset("gpt-oss-120b"), preset("gpt-oss-20b")
MODEL = kernels_alone(recorded_kernels())
TRAFFIC = Traffic(20, 4096, 512)


def test_capacity_by_hand():
    [candidate] = sweep(MODEL, BIG, "decode", TRAFFIC.mean_context, [Plan(4, 1, 4)], [64])
    made = pool("decode", candidate, TRAFFIC, usd_per_gpu_hour=2.0, most_utilisation=0.5)
    capacity = 64 / (candidate.point.step_seconds * 511)                # the first token comes with the prefill
    assert made.capacity == pytest.approx(capacity)
    assert made.replicas == math.ceil(20 / (0.5 * capacity))
    assert made.utilisation == pytest.approx(20 / (made.replicas * capacity)) and made.utilisation <= 0.5
    assert made.usd_per_hour == made.replicas * 4 * 2.0 and made.gpus == made.replicas * 4


def test_a_load_that_is_exactly_full_needs_no_replica_more():
    [candidate] = sweep(MODEL, BIG, "prefill", 4096, [Plan()], [1])
    capacity = 1 / candidate.point.step_seconds
    assert pool("prefill", candidate, Traffic(3 * 0.8 * capacity, 4096, 2)).replicas == 3


@pytest.mark.parametrize("config", [SMALL, BIG])
def test_the_cheapest_plans_that_meet_the_goals(config):
    goals = Goals(1.0, 0.02)
    found = size_pools(MODEL, config, TRAFFIC, goals)
    assert found.prefill.pass_seconds <= 1.0 and found.decode.pass_seconds <= 0.02
    for phase, tokens in (("prefill", 4096), ("decode", TRAFFIC.mean_context)):
        batches = (1,) if phase == "prefill" else (1, 2, 4, 8, 16, 32, 64, 128)
        limit = 1.0 if phase == "prefill" else 0.02
        others = [pool(phase, c, TRAFFIC) for c in sweep(MODEL, config, phase, tokens, batches=batches)
                  if c.memory.fits and c.point.step_seconds <= limit]
        assert getattr(found, phase).usd_per_hour == min(p.usd_per_hour for p in others)


def test_money_adds_up():
    found = size_pools(MODEL, BIG, TRAFFIC, usd_per_gpu_hour=4.0)
    hourly = found.prefill.usd_per_hour + found.decode.usd_per_hour
    assert found.usd_per_day == pytest.approx(24 * hourly)
    assert found.usd_per_request == pytest.approx(hourly / (20 * 3600))
    assert found.transfer_seconds == pytest.approx(kv_bytes(BIG, 4096) / 50e9)
    cheaper = size_pools(MODEL, BIG, TRAFFIC, usd_per_gpu_hour=2.0)
    assert cheaper.usd_per_request == pytest.approx(found.usd_per_request / 2)
    assert cheaper.price.usd_per_million_output == pytest.approx(found.price.usd_per_million_output / 2)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 500), st.integers(1, 20_000), st.integers(2, 2000))
def test_utilisation_stays_below_its_limit_and_more_traffic_never_costs_less_a_day(rate, prompt, answer):
    found = size_pools(MODEL, SMALL, Traffic(rate, prompt, answer))
    more = size_pools(MODEL, SMALL, Traffic(1.5 * rate, prompt, answer))
    for p in (found.prefill, found.decode):
        assert 0 < p.utilisation <= 0.8 * (1 + 1e-9)
    assert more.usd_per_day >= found.usd_per_day


def test_goals_that_no_plan_meets_name_the_nearest():
    with pytest.raises(CostError, match=r"prefill: no plan takes at most 0.0001 s; EP8 DP1 TP8 is the fastest"):
        size_pools(MODEL, BIG, TRAFFIC, Goals(1e-4, 0.02))
    with pytest.raises(CostError, match="decode: no plan takes at most 1e-05 s"):
        size_pools(MODEL, BIG, TRAFFIC, Goals(1.0, 1e-5))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Traffic(0, 1, 2), "requests_per_second is 0"), (lambda: Traffic(1, 0, 2), "input_tokens is 0"),
    (lambda: Traffic(1, 1, 1), "output_tokens is 1"),
    (lambda: Goals(first_token_seconds=-1), "first_token_seconds is -1"),
    (lambda: size_pools(MODEL, BIG, TRAFFIC, most_utilisation=0), "most_utilisation is 0"),
    (lambda: size_pools(MODEL, BIG, replace(TRAFFIC, input_tokens=140_000)), "exceed the 131072 positions"),
])
def test_wrong_inputs_are_named(make, message):
    with pytest.raises(CostError, match=message):
        make()
