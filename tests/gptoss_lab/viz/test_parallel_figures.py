"""The numbers behind the figures of plans, against counts of their own, and that each figure draws them."""
import math

import pytest

from gptoss_lab.config import preset
from gptoss_lab.cost.parts import forward_parts
from gptoss_lab.cost.plan import Plan as CostPlan
from gptoss_lab.cost.workload import prefill
from gptoss_lab.engine.disaggregation_routes import Pair, handover_bytes
from gptoss_lab.parallel import Plan, valid_plans
from gptoss_lab.parallel.traffic import exchanges
from gptoss_lab.viz import (
    parallel_cost,
    parallel_experts,
    parallel_flow,
    parallel_handover,
    parallel_live,
    parallel_plan,
    parallel_sequence,
)

BIG = preset("gpt-oss-120b")


def test_bars_of_a_plan():
    fig = parallel_plan.figure(BIG, Plan(2, 1, 4))
    assert len(fig.data) == 4 * 5
    heads = [bar for bar in fig.data if bar.xaxis == "x"]
    assert [(bar.base[0], bar.x[0]) for bar in heads] == [(n / 4, 1 / 4) for n in range(4)]
    rows = [bar for bar in fig.data if bar.xaxis == "x4"]
    assert [bar.x[0] * 2880 for bar in rows] == pytest.approx([1408, 1472, 1408, 1472])


def test_a_widget_says_why_there_is_no_plan():
    assert "does not divide the 64 query heads" in parallel_plan.described(BIG, 1, 1, 3)
    assert "tp is 1" in parallel_plan.described(BIG, 1, 2, 1, True)


@pytest.mark.parametrize("plan", [p for world in (2, 4, 8) for p in valid_plans(BIG, world)], ids=str)
def test_bytes_are_those_of_the_cost_model(plan):
    """Two countings made apart: link bytes of the cost model's parts, and the exchanges of the plan.

    The cost model has the hidden states alone; the gather here also brings ids and weights of the experts.
    """
    tokens = 128
    parts = forward_parts(BIG, prefill(tokens, plan.dp), plan=CostPlan(plan.ep, plan.dp, plan.tp))
    theirs = sum(part.link_bytes for part in parts)
    ours = sum(e.step_bytes for e in exchanges(BIG, plan)) * tokens
    routing = BIG.num_layers * (plan.dp - 1) * tokens * BIG.experts_per_token * 12
    assert ours - routing == pytest.approx(theirs, rel=1e-12)


def test_flow_draws_every_exchange_once_per_group():
    fig = parallel_flow.figure(BIG, Plan(4, 2, 2), 32)
    lines = [trace for trace in fig.data if trace.mode == "lines+markers"]
    assert [list(trace.y) for trace in lines] == [[0, 1], [2, 3], [0, 2], [1, 3], [0, 2], [1, 3], [0, 1], [2, 3]]
    labels = [a.text for a in fig.layout.annotations if "<br>" in a.text]
    assert [label.split("<br>")[0] for label in labels] == ["all-reduce", "all-gather", "reduce-scatter", "all-reduce"]
    assert labels[0].endswith("184 kB")         # 32 tokens of 5760 bytes, over two ranks all of it
    assert parallel_flow.shown_bytes(32 * 5760) == "184 kB" and parallel_flow.shown_bytes(12) == "12 B"


@pytest.mark.parametrize("plan", [Plan(1, 1, 4), Plan(2, 2, 2), Plan(4, 4, 1)], ids=str)
def test_groups_cover_the_world(plan):
    for axis in ("tp", "dp", "world"):
        assert sorted(r for group in parallel_flow.groups(plan, axis) for r in group) == list(range(plan.world))


def test_step_cost():
    cost = parallel_cost.step_cost(BIG, Plan(4, 1, 4), 8192, 1, latency_us=10)
    assert cost.meetings == pytest.approx(73 * 10e-3) and cost.link == pytest.approx(73 * 8640 / 450e9 * 1e3)
    assert parallel_cost.step_cost(BIG, Plan(), 8192, 1).meetings == 0
    with pytest.raises(ValueError, match="do not know the split sequence"):
        parallel_cost.step_cost(BIG, Plan(1, 1, 2, True), 8192, 1)
    fig = parallel_cost.figure(BIG, valid_plans(BIG, 2), 8192, 8)
    assert [len(bar.y) for bar in fig.data] == [4, 4, 4]


def test_busiest_rank():
    """Slices: every rank reads its part of every expert. One token: of whole experts the busiest rank has at least a
    quarter, exactly the mean of the largest of four draws without order."""
    whole = parallel_experts.busiest_bytes(BIG, Plan(), 1, draws=5)
    slices = parallel_experts.busiest_bytes(BIG, Plan(1, 1, 4), 1, draws=5)
    assert slices / whole == pytest.approx(768 / 2880, rel=0.02)       # biases and partial blocks
    busiest = parallel_experts.busiest_bytes(BIG, Plan(4, 1, 4), 1, draws=400) / (whole / 4)
    splits = [(a, b, c, 4 - a - b - c) for a in range(5) for b in range(5 - a) for c in range(5 - a - b)]
    expected = sum(max(split) * math.prod(math.comb(32, n) for n in split) for split in splits) / math.comb(128, 4)
    assert busiest == pytest.approx(expected, rel=0.06)
    assert [parallel_experts.output_rows(BIG, plan) for plan in (Plan(4, 1, 4), Plan(1, 1, 4))] == [1, 4]


def test_split_sequences():
    assert parallel_sequence.imbalance(parallel_sequence.in_order(8192, 4)) == pytest.approx(1.75, abs=1e-3)
    fig = parallel_sequence.figure(8192, 4)
    assert sum(bar.x[0] for bar in fig.data if bar.y[0] == "in order") == 8192
    assert sum(bar.x[0] for bar in fig.data if bar.y[0] != "in order") == 8192
    frame = parallel_sequence.bytes_table(BIG, 4, 8192).frame
    totals = frame[frame["exchange"].str.startswith("all")].iloc[:, 2].str.replace(",", "").astype(float).tolist()
    assert totals[1] < 0.56 * totals[0]


def test_handover_figures():
    rows = parallel_handover.moved_rows(BIG, 8192)
    assert sum(stop - start for start, stop in rows) * 2048 == handover_bytes(BIG, 8192)
    fig = parallel_handover.pages_figure(BIG, 8192)
    assert [bar.x[0] for bar in fig.data[:2]] == [127, 8192]
    assert len(parallel_handover.times_figure(BIG, 8192).data[0].x) == 5
    table = parallel_handover.routes_table(BIG, Pair(Plan(1, 1, 2, True), Plan(1, 1, 4)))
    assert len(table.frame) == 8


def test_live_runs():
    path, batch = parallel_live.small_checkpoint(), parallel_live.prompts((9, 2))
    (found,) = parallel_live.check_plans(path, [Plan(4, 1, 4)], batch)
    assert found.difference < 1e-5 and found.read == found.planned
    assert all(t <= h for t, h in zip(found.touched, found.held, strict=True)) and sum(found.touched) < sum(found.held)
    assert "as planned" in str(parallel_live.plans_table([found]))
    tokens, received = parallel_live.hand_over(path, Pair(Plan(), Plan(1, 1, 2)), batch)
    assert tokens == parallel_live.alone(path, batch) and received[0] == received[1] > 0
    assert "rank 2 did not reach 'combine of layer 2'" in parallel_live.late_rank(0.2)


def test_kernel_source():
    assert parallel_live.kernel_source("_meet").startswith("def _meet(")
    with pytest.raises(ValueError, match="no function 'nothing'"):
        parallel_live.kernel_source("nothing")
