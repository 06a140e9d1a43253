"""Columns: the bound taken apart, one set per weight format, links only between GPUs."""
import pytest
from cost_strategies import models, plans, precisions
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import FP8_EXPERTS, SERVED, Plan, Precision, decode_bound, prefill_bound
from gptoss_lab.cost.columns import COLUMNS, EXPERT_WEIGHTS, EXPERTS, FACTORS, columns, expert_launches
from gptoss_lab.cost.workload import decode, prefill

BIG = preset("gpt-oss-120b")


@settings(deadline=None)
@given(models(), plans(), precisions(), st.sampled_from([1, 8, 64]), st.sampled_from([128, 8192]))
def test_every_column_is_there_and_none_is_negative(config, plan, precision, batch, tokens):
    amounts = columns(config, decode(tokens, batch), precision, plan)
    assert tuple(amounts) == COLUMNS and min(amounts.values()) >= 0
    assert {n for n in (*EXPERTS, *EXPERT_WEIGHTS) if amounts[n]} == {
        f"experts_{precision.experts}", f"expert_weights_{precision.experts}"}
    assert all((amounts[n] == 0) == (plan.tp == 1) for n in ("link", "link_one_shot", "collectives"))
    assert all((amounts[n] == 0) == (plan.dp == 1) for n in ("link_gathers", "gathers"))


@pytest.mark.parametrize("precision", [FP8_EXPERTS, SERVED])
def test_a_long_prefill_is_the_sum_of_its_factor_columns(precision):
    """Where every part is limited by FLOPs, the columns add up to the bound of the parts that compute."""
    amounts = columns(BIG, prefill(32768), precision)
    limit = prefill_bound(BIG, 32768, precision=precision)
    parts = sum(amounts[n] for n in FACTORS if not n.startswith(("expert_weights", "activations", "link")))
    assert parts == pytest.approx(limit.sequential_seconds, rel=2e-3)


def test_a_decode_step_reads_weights_and_keys():
    amounts, limit = columns(BIG, decode(8192, 32)), decode_bound(BIG, 8192, 32)
    assert amounts["expert_weights_fp8"] == pytest.approx(
        limit["experts_gate_up"].memory_seconds + limit["experts_down"].memory_seconds)
    assert amounts["attention_full"] == limit["attention_full"].seconds
    assert amounts["layers"] == 36 and amounts["projection_launches"] == 72 and amounts["passes"] == 1


def test_packed_experts_are_counted_at_the_fp8_rate_and_with_their_bytes():
    fp8, packed = (columns(BIG, prefill(8192), Precision(experts=form)) for form in ("fp8", "mxfp4"))
    assert packed["experts_mxfp4"] == fp8["experts_fp8"]
    assert packed["expert_weights_mxfp4"] / fp8["expert_weights_fp8"] == pytest.approx(0.531, abs=0.002)


def test_collectives_and_one_shot_bytes_by_hand():
    """EP4 DP1 TP4, 10 rows: after attention and after the experts each rank reads the rows of three others."""
    amounts = columns(BIG, prefill(10), FP8_EXPERTS, Plan(4, 1, 4))
    assert amounts["collectives"] == 36 * 2 and amounts["collectives_by_extra_rank"] == 36 * 2 * 2
    assert amounts["link"] == pytest.approx(36 * 10 * 2 * 1.5 * 5760 / 450e9)
    assert amounts["link_one_shot"] == pytest.approx(36 * 10 * (3 + 3) * 5760 / 450e9)
    amounts = columns(BIG, decode(100, 8), FP8_EXPERTS, Plan(8, 2, 4))       # 4 rows each; 4 of the others are gathered
    assert amounts["collectives"] == amounts["gathers"] == 36 * 2
    assert amounts["link_one_shot"] == pytest.approx(36 * 4 * (3 + 3) * 5760 / 450e9)
    assert amounts["link_gathers"] == pytest.approx(36 * (4 + 4) * 5760 / 450e9)
    assert amounts["expert_launches"] == 36 * (5 + 1)                        # one adds what comes back


def test_a_long_prompt_over_ranks_keeps_own_rows():
    """Bytes, norms and routing fall; nothing else changes, nor does a system that sums whole rows."""
    plan = Plan(2, 1, 2)
    own, whole = (columns(BIG, prefill(8192), SERVED, plan, own_rows=kept) for kept in (True, False))
    assert {n for n in COLUMNS if own[n] != whole[n]} == {
        "link", "link_one_shot", "activations", "collectives", "projections_bf16"}
    assert own["link"] == pytest.approx((72 * 4096 * 5760 + 71 * 4096 * 2972 + 36 * 4096 * 32) / 450e9)
    assert whole["link"] == pytest.approx(72 * 8192 * 5760 / 450e9) and own["link_one_shot"] == 0
    assert own["activations"] == pytest.approx(whole["activations"] / 2)
    assert own["activations"] == pytest.approx(2 * 73 * 4096 * 5760 / 4.8e12)
    router = 36 * 2 * 8192 * 128 * 2880 / 989e12
    assert whole["projections_bf16"] - own["projections_bf16"] == pytest.approx(router / 2)
    assert own["collectives"] == 36 * 3
    for work, precision in ((prefill(1000), SERVED), (decode(8192, 128), SERVED), (prefill(8192), FP8_EXPERTS)):
        assert columns(BIG, work, precision, plan) == columns(BIG, work, precision, plan, own_rows=False)


def test_groups_norm_and_route_all_that_they_gather():
    one, two = columns(BIG, prefill(8192), SERVED), columns(BIG, prefill(8192, 2), SERVED, Plan(2, 2, 1))
    assert two["activations"] / one["activations"] == pytest.approx((37 + 36 * 2) / 73)
    assert two["link"] == 0 and two["link_gathers"] == pytest.approx(36 * 2 * 8192 * 5760 / 450e9)


def test_a_spare_row_of_another_group_reaches_experts():
    """One user on two groups: two rows in every step, and so two rows' experts."""
    one, two = (columns(BIG, decode(8192, batch), SERVED, Plan(2, 2, 1)) for batch in (1, 2))
    assert one == two and one["expert_launches"] == 36 * (5 + 1)


def test_the_weights_of_experts_are_those_of_the_fullest_rank():
    """One token on two ranks with half of the experts each: 2.7 of its 4 experts, not 2; with slices 4 halves."""
    alone, experts, slices = (columns(BIG, decode(8192), SERVED, plan)["expert_weights_fp8"]
                              for plan in (Plan(), Plan(2, 1, 2), Plan(1, 1, 2)))
    assert 2.7 / 4 < experts / alone < 2.8 / 4
    assert slices / alone == pytest.approx(1472 / 2880, rel=0.01)           # the longer of two slices


@pytest.mark.parametrize(("rows", "form", "launches"), [
    (1, "fp8", 3), (1, "mxfp4", 5), (2, "fp8", 5), (8, "fp8", 5), (9, "mxfp4", 6), (8192, "fp8", 6)])
def test_launches_of_an_moe_layer(rows, form, launches):
    assert expert_launches(rows, form) == launches
    assert columns(BIG, decode(8192, rows), Precision(experts=form))["expert_launches"] == 36 * launches
