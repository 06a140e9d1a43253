"""Sweeps: the front is a front, the winner of a goal is the cheapest that fits, nothing that does not fit wins."""
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import CostError, MemoryFit, Plan, decode_bound, decode_point, usd_per_million_tokens
from gptoss_lab.cost.sweep import (
    BATCHES,
    EP_PLANS,
    NODE_PLANS,
    Candidate,
    cheapest_at,
    pareto_front,
    sweep,
    winners,
    wins,
)

BIG = preset("gpt-oss-120b")
ROOM, NONE = MemoryFit(1e9, 0, 0, 0), MemoryFit(1.0, 2, 0, 0)


@st.composite
def candidates(draw):
    step = draw(st.floats(1e-3, 1e-1))
    batch, plan = draw(st.sampled_from(BATCHES)), draw(st.sampled_from(EP_PLANS))
    memory = draw(st.sampled_from([ROOM, ROOM, NONE]))
    return Candidate(plan, batch, 8192, decode_point(step, batch, plan.world), memory)


def test_a_node_has_thirty_plans():
    assert len(NODE_PLANS) == len(set(NODE_PLANS)) == 30
    assert {p.ep for p in NODE_PLANS} == {p.dp for p in NODE_PLANS} == {p.tp for p in NODE_PLANS} == {1, 2, 4, 8}


def test_a_sweep_at_the_bound_is_the_bound_with_its_price():
    found = sweep(None, BIG, "decode", 8192, [Plan(4, 1, 4)], [32], usd_per_gpu_hour=2.0, utilisation=0.5)
    seconds = decode_bound(BIG, 8192, 32, plan=Plan(4, 1, 4)).sequential_seconds
    assert len(found) == 1 and found[0].point.step_seconds == seconds and found[0].speed == pytest.approx(1 / seconds)
    assert found[0].usd == pytest.approx(usd_per_million_tokens(seconds, 32, 4, 2.0, 0.5))


def test_what_does_not_fit_is_in_the_sweep_and_says_so():
    by_batch = {c.batch: c for c in sweep(None, BIG, "decode", 8192, [Plan()])}
    assert by_batch[32].memory.fits and not by_batch[128].memory.fits
    assert "does not fit" in by_batch[128].memory.reason


@settings(deadline=None)
@given(st.lists(candidates(), max_size=30))
def test_no_candidate_beats_a_point_of_the_front(made):
    front, fitting = pareto_front(made), [c for c in made if c.memory.fits]
    assert all(c.memory.fits for c in front) and bool(front) == bool(fitting)
    for point in front:
        assert not any(c.speed >= point.speed and c.usd < point.usd for c in fitting)
    for c in fitting:                                   # and whatever is not on it is beaten or equalled by one that is
        assert any(p.speed >= c.speed and p.usd <= c.usd for p in front)


@settings(deadline=None)
@given(st.lists(candidates(), min_size=1, max_size=30), st.floats(10, 1000))
def test_the_winner_is_on_the_front_and_fast_enough(made, goal):
    best = cheapest_at(made, goal)
    enough = [c for c in made if c.memory.fits and c.speed >= goal]
    assert (best is None) == (not enough)
    if best is not None:
        assert best.usd == min(c.usd for c in enough)
        assert best.usd in [c.usd for c in pareto_front(made)]


def test_wins_are_counted_by_plan_over_the_goals_that_can_be_reached():
    slow, fast = (Candidate(plan, 1, 8192, decode_point(step, 1, plan.world), ROOM)
                  for plan, step in ((Plan(), 0.02), (Plan(8, 1, 8), 0.005)))
    assert wins([slow, fast], (10, 50, 100, 200, 300)) == Counter({slow.plan: 2, fast.plan: 2})
    assert set(winners([slow, fast], (10, 300))) == {10}
    assert winners([replace(slow, memory=NONE)], (10,)) == {}
    with pytest.raises(CostError, match="no plan reaches any of the goals 300 tokens/s"):
        wins([slow, fast], (300,))
