"""From pools to a fleet: sizes that meet their goals, limits by hand, and a cliff where the arithmetic puts it."""
import pytest
from cost_truth import recorded_kernels

from gptoss_lab.config import preset
from gptoss_lab.cost import CostError, kv_bytes, max_sequences
from gptoss_lab.cost.performance import kernels_alone
from gptoss_lab.cost.pools import Goals, Traffic, size_pools
from gptoss_lab.cost.scale import Scenario, build_fleet, front_end_seconds, grown, limits, size_fleet, under_growth

BIG = preset("gpt-oss-120b")
ROWS = recorded_kernels()
MODEL = kernels_alone(ROWS)
TRAFFIC, GOALS = Traffic(20, 4096, 512), Goals(1.0, 0.02)


@pytest.mark.parametrize("rate", [2, 60])
def test_a_sized_fleet_meets_its_goals_and_one_replica_less_need_not(rate):
    sized = size_fleet(MODEL, BIG, Scenario(Traffic(rate, 4096, 512), GOALS))
    assert sized.meets
    assert sized.report.quantiles("first_token", (0.95,))[0] <= 1.0
    assert sized.report.quantiles("per_token", (0.95,))[0] <= 0.02
    assert sized.fleet.usd_per_hour == sized.pools.prefill.usd_per_hour + sized.pools.decode.usd_per_hour


def test_a_hard_goal_for_the_first_token_adds_prefill_replicas():
    easy, hard = (size_fleet(MODEL, BIG, Scenario(TRAFFIC, Goals(first, 0.02)), 1500) for first in (1.5, 0.1))
    assert hard.meets and hard.pools.prefill.gpus > easy.pools.prefill.gpus
    assert hard.report.quantiles("first_token", (0.95,))[0] <= 0.1


def test_a_fleet_has_the_times_of_its_plans():
    pools = size_pools(MODEL, BIG, TRAFFIC, GOALS)
    fleet = build_fleet(MODEL, BIG, pools)
    assert fleet.prefill_seconds(4096) == MODEL.seconds("prefill", BIG, 4096, 1, pools.prefill.plan)
    assert fleet.prefill_seconds(4060) == fleet.prefill_seconds(4096)   # in steps of 64 tokens
    assert len(fleet.step_seconds) == pools.decode.batch
    assert fleet.step_seconds[-1] == pools.decode.pass_seconds
    assert fleet.transfer_seconds(4096) == pools.transfer_seconds


def test_growing_a_pool_keeps_its_load():
    pools = size_pools(MODEL, BIG, TRAFFIC, GOALS)
    before, after = pools.decode, grown(pools, "decode", more=2).decode
    assert after.replicas == before.replicas + 2
    assert after.utilisation * after.replicas == pytest.approx(before.utilisation * before.replicas)
    assert after.usd_per_hour == 3 * after.gpus and grown(pools, "decode").prefill == pools.prefill
    many = grown(pools, "prefill", more=20 - pools.prefill.replicas)
    assert grown(many, "prefill").prefill.replicas == 22                # one in ten, when they are many


def test_limits_by_hand_and_in_order():
    pools = size_pools(MODEL, BIG, TRAFFIC, GOALS)
    found = limits(BIG, pools, front_end_seconds_per_token=1e-4, front_end_cores=4)
    assert list(found.values()) == sorted(found.values())
    assert found["prefill replicas"] == pytest.approx(1 / pools.prefill.utilisation)
    assert found["front end, 4 cores"] == pytest.approx(4 / (20 * 512 * 1e-4))
    assert found["network between the pools"] == pytest.approx(pools.prefill.gpus * 50e9 / (20 * kv_bytes(BIG, 4096)))
    at_once = 20 * 511 * pools.decode.pass_seconds
    room = pools.decode.replicas * max_sequences(BIG, 4608, plan=pools.decode.plan)
    assert found["KV memory of decode"] == pytest.approx(room / at_once)
    assert "front end, 8 cores" not in limits(BIG, pools)


def test_the_front_end_is_the_recorded_row():
    assert front_end_seconds(ROWS) == pytest.approx(87.9e-6, rel=0.01)
    with pytest.raises(CostError, match="no row of the front end's CPU time"):
        front_end_seconds([])


def test_waiting_explodes_beyond_the_limit_and_not_before():
    pools = size_pools(MODEL, BIG, TRAFFIC, GOALS)
    first = 1 / pools.prefill.utilisation
    reports = under_growth(MODEL, BIG, Scenario(TRAFFIC, GOALS), pools, (1.0, 1.3 * first), 3000)
    before, after = (report.quantiles("first_token", (0.5,))[0] for report in reports.values())
    assert before < 1.0 and after > 10 * before
    assert reports[1.3 * first].prefill_busy == pytest.approx(1.0, abs=0.01)


def test_lengths_of_a_scenario_fit_the_model():
    prompt, answer = Scenario(TRAFFIC, GOALS, variation=3.0).lengths(BIG)
    assert prompt.most + answer.most <= BIG.max_position_embeddings and answer.least == 2
