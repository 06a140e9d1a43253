"""Every cost and fleet figure is titled, marked, labelled and small; tables hold the numbers they claim."""
import math

import pytest
from figure_checks import check_figure

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.cost import Plan
from gptoss_lab.cost.comparison import compare
from gptoss_lab.cost.equations import engine_rows, plan_of
from gptoss_lab.cost.estimate import Question
from gptoss_lab.cost.holdout import held_out
from gptoss_lab.cost.performance import calibrate, kernels_alone, published_system
from gptoss_lab.cost.pools import Goals, Traffic
from gptoss_lab.cost.scale import Scenario, limits, size_fleet, under_growth
from gptoss_lab.viz import (
    cost_bounds,
    cost_decode,
    cost_fit,
    cost_latency,
    cost_prefill,
    fleet_check,
    fleet_growth,
)

SMALL, BIG = preset("gpt-oss-20b"), preset("gpt-oss-120b")
RECORDED = results.read_rows(results.recorded_folder())
ROWS = [r for r in RECORDED if r["suite"] in ("attention", "serve") or r["case"].startswith("ceiling")]
"""A state in which no engine has been measured."""
KERNELS, POST = kernels_alone(ROWS), published_system()
COMPARED = compare(ROWS)
CHARTS = cost_decode.charts(KERNELS, [BIG, SMALL])
SCENARIO = Scenario(Traffic(20, 4096, 512), Goals(1.0, 0.02))


@pytest.fixture(scope="module")
def sized():
    return size_fleet(KERNELS, BIG, SCENARIO, 1000)


def growth(sized):
    reports = under_growth(KERNELS, BIG, SCENARIO, sized.pools, (1.0, 3.0), 500)
    return fleet_growth.figure(reports, limits(BIG, sized.pools), "a test")


FIGURES = {
    "decode bound": lambda: cost_bounds.decode_figure(BIG, 8192),
    "charts": lambda: cost_decode.figure(CHARTS, KERNELS.name),
    "efficiency": lambda: cost_fit.efficiency_figure(KERNELS),
    "errors": lambda: cost_fit.errors_figure(POST, "prefill"),
    "latency": lambda: cost_latency.figure(cost_latency.shares(KERNELS, [SMALL], (0.0, 5.0)), KERNELS.name),
    "prefill": lambda: cost_prefill.figure(COMPARED),
    "queues": lambda: fleet_check.figure(fleet_check.check((0.3, 0.6), longest=500)),
}
WITHOUT_Y_TITLE = ("prefill", "growth")        # rows named on an axis


def check(name, figure):
    check_figure(figure, name not in WITHOUT_Y_TITLE, 90_000)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_titled_marked_labelled_and_small(name):
    check(name, FIGURES[name]())


def test_the_figure_of_growth(sized):
    figure = growth(sized)
    check("growth", figure)
    assert figure.layout.title.text.startswith("Prefill replicas break first, at 1.")
    bars = next(trace for trace in figure.data if trace.type == "bar")
    assert list(bars.x) == sorted(bars.x, reverse=True) and len(bars.x) == 4


# -- the published rows ------------------------------------------------------------------------------------------------
def test_the_prefill_figure_draws_all_rows_with_their_numbers():
    figure = FIGURES["prefill"]()
    published = [trace for trace in figure.data if trace.name == "published"]
    assert sorted(v for trace in published for v in trace.x) == sorted(c.row.latency_s for c in COMPARED)
    ours = [trace for trace in figure.data if (trace.name or "").startswith("ours")]
    assert sum(len(trace.x) for trace in ours) == 32
    assert {symbol for trace in ours for symbol in trace.marker.symbol} == {"circle-open"}      # none is measured yet
    texts = [note.text for note in figure.layout.annotations]
    assert all(f"{c.row.latency_s:.3f}" in texts and f"{c.row.usd_per_million_input_tokens:.3f}" in texts
               for c in COMPARED)
    assert "32 of 32" in figure.layout.title.text and "(modelled)" in figure.layout.title.text


def test_measured_rows_are_full_marks_and_the_error_of_hollow_ones_says_where_it_was_checked():
    figure = cost_prefill.figure(compare(RECORDED))
    ours = [trace for trace in figure.data if (trace.name or "").startswith("ours")]
    assert [list(trace.marker.symbol) for trace in ours] == [["circle"] * 8 + ["circle-open"] * 8] * 2
    passes = [row["conditions"] for row in engine_rows(RECORDED, "prefill")]
    held = [of for of in passes if held_out(of["tokens"], of["batch"], plan_of(of).world)]
    alone = sum(plan_of(of).world == 1 for of in held)
    assert 0 < alone < len(held)
    assert f"hollow marks: {len(held)} held-out prefill rows" in figure.layout.title.subtitle.text
    one = [row for row in RECORDED if row["case"] != "prefill over ranks"]
    subtitle = cost_prefill.figure(compare(one)).layout.title.subtitle.text
    assert f"no pass on several GPUs was measured; on one, {alone} held-out" in subtitle


def test_the_prefill_table_marks_every_number():
    frame = cost_prefill.rows_table(COMPARED).frame
    assert len(frame) == 32 and set(frame["ours is"]) == {"modelled: kernels alone"} and set(frame["live, s"]) == {""}
    assert frame["recomputed, $/M"][0] == "0.0370" and frame["published / bound"][0] == "7.6"


def test_a_live_row_is_read_from_the_users_folder(tmp_path):
    assert cost_prefill.yours(tmp_path / "none")[0] == {}
    made = {**next(r for r in RECORDED if r["suite"] == "prefill" and r["conditions"]["tokens"] == 2048),
            "backend": "fast, fp8 experts, fp8 projections"}
    results.write_rows(tmp_path / "prefill.jsonl", [made])
    live, whose = cost_prefill.yours(tmp_path)
    assert live == {("gpt-oss-20b", "EP1 DP1 TP1", 2048): made["value"]}
    assert whose.startswith("1 prefill rows of your own: NVIDIA H200, fast")


# -- decode ------------------------------------------------------------------------------------------------------------
def test_a_chart_has_four_curves_a_front_and_every_batch_that_fits():
    figure = FIGURES["charts"]()
    curves = [t for t in figure.data if t.mode == "lines+markers"]
    assert len(curves) == 16 and sum(t.name == "Pareto front" for t in figure.data) == 4
    assert sum(len(t.x) for t in curves) == sum(c.memory.fits for found in CHARTS.values() for c in found) < 4 * 32
    assert "EP8 is the cheapest plan for " in figure.layout.title.text


def test_the_table_of_winners_names_plan_batch_and_price():
    frame = cost_decode.winners_table(CHARTS, (50, 10_000)).frame
    assert frame.iloc[0, 1].startswith("EP") and ", $" in frame.iloc[0, 1]
    assert set(frame.iloc[1, 1:]) == {"not reached"}


def test_waiting_for_ranks_takes_goals_from_ep8():
    shares = cost_latency.shares(KERNELS, [BIG], (0.0, 10.0))
    assert all(math.isclose(sum(by.values()), 1.0) for by in shares.values())
    assert shares[10.0][Plan(8, 1, 8)] < shares[0.0][Plan(8, 1, 8)]
    assert cost_latency.headline({0.0: {Plan(8, 1, 8): 1.0, Plan(4, 1, 4): 0.0}}).startswith("EP8 wins most")


# -- bounds, fits, fleets ----------------------------------------------------------------------------------------------
def test_the_table_of_parts_adds_up():
    question = Question(BIG, "decode", 8192, 32)
    frame = cost_bounds.parts_table(question).frame
    total = sum(float(cell) for cell in frame["bound, ms"])
    assert total == pytest.approx(1e3 * question.bound.sequential_seconds, abs=0.01)
    assert sum(float(cell) for cell in frame["share, %"]) == pytest.approx(100, abs=0.6)


def test_the_table_of_memory_says_what_fits():
    frame = cost_bounds.memory_table([BIG], 8192).frame
    assert frame.iloc[0, 2] == "119.0" and frame.iloc[0, 3] == "57" and frame.iloc[0, 5] == "232"


def test_every_kernel_that_was_timed_is_a_mark_of_the_efficiency_figure():
    for phase in ("prefill", "decode"):
        points = cost_fit.efficiency(KERNELS, phase)
        assert {"attention_full", "experts_fp8", "link"} <= set(points)
        assert all(0 < p[2] <= 1 for found in points.values() for p in found)
        origins = {kind: {p[4] for p in points[kind]} for kind in ("attention_full", "experts_fp8", "link")}
        assert origins == {"attention_full": {"recorded"}, "experts_fp8": {"published"}, "link": {"published"}}


def test_coefficients_are_listed_and_what_is_missing_says_why():
    frame = cost_fit.coefficients_table([calibrate(ROWS), KERNELS, POST]).frame.set_index("coefficient")
    assert set(frame["this engine, decode"]) == {"", *frame["this engine, decode"].tail(1)}
    assert "measured yet" in frame.loc["none, because", "this engine, decode"]
    assert frame.loc["none, because", "origin"] == "missing" and (frame["origin"] == "modelled").sum() == len(frame) - 1
    assert "experts_bf16" not in frame.index             # touched by nothing
    assert "x bound (" in frame.loc["experts_fp8", "kernels alone, prefill"]
    assert " us (" in frame.loc["layers", "the published system, prefill"]


def test_a_calibrated_engine_is_a_column_with_what_no_row_touches():
    frame = cost_fit.coefficients_table([calibrate(RECORDED)]).frame.set_index("coefficient")
    assert frame.loc["experts_mxfp4", "this engine, prefill"] == "not measured"
    assert "x bound (" in frame.loc["experts_mxfp4", "this engine, decode"] and "none, because" not in frame.index


def test_errors_are_drawn_for_whole_passes_alone():
    model = calibrate(RECORDED)
    drawn = sum(len(trace.x) for trace in cost_fit.errors_figure(model, "decode").data)
    assert drawn == len(engine_rows(RECORDED, "decode")) < len(model.of("decode").equations)


def test_recorded_steps_stand_beside_the_bounds_of_both_formats():
    frame = cost_bounds.formats_table(RECORDED, BIG, 8192, (1, 2, 128)).frame
    recorded = frame[["FP8, ms (recorded)", "MXFP4, ms (recorded)", "FP8 / MXFP4, recorded"]].values.tolist()
    assert recorded[1] == ["", "", ""] and recorded[2][0] == recorded[2][2] == "" and recorded[2][1]
    assert float(recorded[0][0]) / float(recorded[0][1]) == pytest.approx(float(recorded[0][2]), abs=0.01)
    assert float(frame["FP8 bound, ms (modelled)"][0]) < float(recorded[0][0])


def test_a_line_per_size_of_traffic(sized):
    frame = fleet_growth.sized_table({20: sized}).frame
    assert frame["goals met"][0] == "yes" and " x EP" in frame["prefill"][0] and "batch" in frame["decode"][0]
    assert frame["first token p50 / p95 / p99, ms"][0].count("/") == 2
