"""Answers keep their marks, what is missing says why, and the 32 published rows stand beside bound and ours."""
import pytest
from cost_truth import recorded_kernels, row, rows_of

from gptoss_lab.config import preset
from gptoss_lab.cost import SERVED, CostError, Plan, Precision, prefill_bound
from gptoss_lab.cost.comparison import compare
from gptoss_lab.cost.estimate import Question, answers
from gptoss_lab.cost.performance import calibrate, kernels_alone, published_system
from gptoss_lab.cost.published import read_published

BIG = preset("gpt-oss-120b")
RECORDED = recorded_kernels()
MODELS = [calibrate(RECORDED), kernels_alone(RECORDED), published_system()]


def answered(question, rows=RECORDED, models=MODELS):
    return {answer.name: answer for answer in answers(question, rows, models)}


def test_a_published_prefill_has_bound_published_and_two_models():
    found = answered(Question(BIG, "prefill", 8192, precision=SERVED))
    assert list(found) == ["bound", "measured", "published", "this engine", "kernels alone", "the published system"]
    assert found["bound"].seconds == prefill_bound(BIG, 8192, precision=SERVED).seconds
    assert found["published"].seconds == 0.364 and found["published"].mark == "published"
    assert found["measured"].seconds is None and found["measured"].source == "not measured yet"
    assert "have been measured yet" in found["this engine"].source and found["this engine"].seconds is None
    assert found["bound"].seconds < found["kernels alone"].seconds < found["the published system"].seconds
    assert "median error" in found["the published system"].source


def test_what_was_not_published_says_so():
    for question in (Question(BIG, "decode", 8192), Question(BIG, "prefill", 8192, 2), Question(BIG, "prefill", 4096),
                     Question(BIG, "prefill", 8192, 1, Plan(1, 1, 2))):
        found = answered(question)["published"]
        assert found.seconds is None and found.point(question) is None
    assert answered(Question(BIG, "decode", 8192))["the published system"].source == (
        "its decode charts were not published as numbers")


def test_a_measured_row_is_found_by_plan_and_formats_whatever_multiplies_packed_weights():
    rows = [row("decode", 0.004, BIG.name, Plan(4, 1, 4), 16, 8192),
            row("decode", 0.003, BIG.name, Plan(4, 1, 4), 16, 8192, experts="mxfp4")]
    for experts, seconds in (("fp8", 0.004), ("mxfp4", 0.003), ("bf16", None)):
        question = Question(BIG, "decode", 8192, 16, Plan(4, 1, 4), Precision(experts=experts))
        found = answered(question, rows, [])["measured"]
        assert found.seconds == (seconds and pytest.approx(seconds)) and found.mark == "recorded"
    assert answered(Question(BIG, "decode", 8192, 16), rows, [])["measured"].seconds is None


def test_speed_and_price_of_an_answer():
    question = Question(BIG, "prefill", 8192, 1, Plan(2, 1, 2), SERVED, usd_per_gpu_hour=3.0, utilisation=0.5)
    point = answered(question)["published"].point(question)
    assert point.tokens_per_second_per_user == pytest.approx(8192 / 0.190)
    assert point.usd_per_million_tokens == pytest.approx(2 * 2 * 3 / 3600 * 0.190 / 8192 * 1e6)
    step = Question(BIG, "decode", 8192, 32, usd_per_gpu_hour=1.0)
    found = answered(step)["bound"]
    assert found.point(step).tokens_per_second == pytest.approx(32 / found.seconds)


def test_a_phase_that_does_not_exist_is_named():
    with pytest.raises(CostError, match="phase is 'training'"):
        Question(BIG, "training", 8192)


# -- the 32 rows -------------------------------------------------------------------------------------------------------
def test_all_rows_are_compared_and_without_measurements_ours_is_modelled():
    compared = compare(RECORDED)
    assert [c.row for c in compared] == read_published() and len(compared) == 32
    for c in compared:
        line = c.table()
        assert c.row.agrees and line["cost_agrees"]
        assert line["bound_s"] < line["ours_s"] < line["published_s"]
        assert line["ours_is"] == "kernels alone" and line["live_s"] is None
        assert line["recomputed_usd_per_million"] == pytest.approx(line["published_usd_per_million"], abs=0.0011)
        assert c.published_over_ours == pytest.approx(line["published_s"] / line["ours_s"])
        assert c.refit_s == pytest.approx(c.row.latency_s, rel=0.11)


def test_a_measured_row_takes_the_place_of_the_model_and_others_stay_modelled():
    mine = row("prefill", 0.2, BIG.name, Plan(), 1, 8192, projections="fp8")
    live = {(BIG.name, "EP1 DP1 TP1", 8192): 0.25}
    compared = compare([*RECORDED, mine], live)
    assert (compared[0].ours.name, compared[0].ours.seconds, compared[0].live_s) == ("measured", 0.2, 0.25)
    assert {c.ours.name for c in compared[1:]} == {"kernels alone"} and compared[1].live_s is None


def test_a_calibrated_engine_comes_before_the_kernels():
    served = [{**r, "conditions": {**r["conditions"], "projections": "fp8"}} for r in rows_of("prefill")]
    names = [c.ours.name for c in compare([*RECORDED, *served])]
    assert set(names) == {"measured"}
    without = [r for r in served if r["conditions"]["tokens"] != 32768]
    names = {c.row.input_tokens: c.ours.name for c in compare([*RECORDED, *without])}
    assert names == {8192: "measured", 32768: "this engine", 65536: "measured", 128000: "measured"}
