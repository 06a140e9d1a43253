"""Columns: the bound taken apart, one set per weight format, links only between GPUs."""
import pytest
from cost_strategies import models, plans, precisions
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import FP8_EXPERTS, SERVED, Plan, Precision, decode_bound, prefill_bound
from gptoss_lab.cost.columns import COLUMNS, EXPERT_WEIGHTS, EXPERTS, FACTORS, columns
from gptoss_lab.cost.workload import decode, prefill

BIG = preset("gpt-oss-120b")


@settings(deadline=None)
@given(models(), plans(), precisions(), st.sampled_from([1, 8, 64]), st.sampled_from([128, 8192]))
def test_every_column_is_there_and_none_is_negative(config, plan, precision, batch, tokens):
    amounts = columns(config, decode(tokens, batch), precision, plan)
    assert tuple(amounts) == COLUMNS and min(amounts.values()) >= 0
    assert {n for n in (*EXPERTS, *EXPERT_WEIGHTS) if amounts[n]} == {
        f"experts_{precision.experts}", f"expert_weights_{precision.experts}"}
    alone = plan.world == 1
    assert all((amounts[n] == 0) == alone for n in ("link", "link_one_shot", "collectives"))


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
    assert amounts["link_one_shot"] == pytest.approx(36 * 10 * (3 + 3) * 5760 / 450e9)
    amounts = columns(BIG, decode(100, 8), FP8_EXPERTS, Plan(8, 2, 4))       # 4 rows each; 4 of the others are gathered
    assert amounts["collectives"] == 36 * 3
    assert amounts["link_one_shot"] == pytest.approx(36 * (4 * 3 + 4 * 7 + 4) * 5760 / 450e9)
