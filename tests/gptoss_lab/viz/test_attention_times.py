"""Tables of timings: every case has a line, nothing is invented for absent ones, pairs come from one run."""
import pytest
import torch
from figure_checks import check_figure

from gptoss_lab import results
from gptoss_lab.bench import attention as bench
from gptoss_lab.viz import attention_times as times


def row(case, backend, value, *, metric="microseconds", unit="us", bound=50.0, peer=None, command="one", spread=0.02,
        **conditions):
    return {
        "suite": "attention", "case": case, "backend": backend, "metric": metric, "value": value, "unit": unit,
        "bound": bound, "conditions": {"dtype": "bf16", "heads": 64, "kv_heads": 8, "head_dim": 64, "l2": "flushed",
                                       **conditions},
        "peer": peer and {"name": peer[0], "value": peer[1]}, "repetitions": 9, "statistic": "median", "raw": [],
        "spread": spread, "gpu": "NVIDIA H200", "driver": "1.2", "clocks": None,
        "versions": {"torch": "2", "triton": "3"}, "commit": "abc", "date": "2026-01-02", "command": command,
    }


ROWS = [
    row("a", "slow", 200.0), row("a", "fast", 100.0), row("a", "fast", 1000.0, metric="gb_per_s", unit="GB/s"),
    row("a", "fast without sinks", 99.0, peer=("fast", 100.0), spread=0.03),
    row("a", "broken", None, failed="it does not fit"), row("b", "fast", 60.0, command="two"),
]


def test_a_case_without_rows_says_so_and_shows_no_number():
    frame = times.times_table(ROWS, ["c"]).frame
    assert frame.iloc[0].tolist() == ["c", "not recorded yet", *[""] * 7]


def test_lines_are_sorted_marked_and_complete():
    frame = times.times_table(ROWS, ["a", "b"]).frame
    assert frame["backend"].tolist() == ["fast without sinks", "fast", "slow", "broken", "fast"]
    assert frame["% of bound"].tolist() == ["51", "50", "25", "", "83"]
    assert frame["rate"].tolist() == ["", "1,000 GB/s", "", "", ""]
    assert frame["time, us"].tolist()[3] == "failed: it does not fit"
    assert frame["run"].tolist() == ["A", "A", "A", "A", "B"] and set(frame["origin"]) == {"recorded"}


def test_the_last_row_of_a_backend_counts():
    again = [*ROWS, row("a", "fast", 80.0)]
    assert [r["value"] for r in times.times(again, "a") if r["backend"] == "fast"] == [80.0]


def test_a_live_table_is_marked_and_has_no_bound_where_there_is_none():
    frame = times.times_table([row("a", "x", 10.0, bound=None)], ["a"], "live").frame
    assert frame[["bound, us", "% of bound", "origin"]].iloc[0].tolist() == ["", "", "live"]


def test_the_cost_of_the_sink_uses_the_pair_of_one_run():
    assert times.sink_costs(ROWS) == [("a", "fast", 100.0, 99.0, pytest.approx(100 / 99), pytest.approx(3.0))]
    later = [*ROWS, row("a", "fast", 500.0, command="three")]
    assert times.sink_costs(later)[0][2] == 100.0
    assert times.costs_table(ROWS).frame["within the spread"].tolist() == ["yes"]
    far = [row("a", "x without sinks", 50.0, peer=("x", 100.0))]
    assert times.costs_table(far).frame["within the spread"].tolist() == ["no"]
    assert times.sink_costs([row("a", "x without sinks", 50.0, peer=("other", 100.0))]) == []


def test_the_cost_figure_fills_only_what_lies_beyond_the_spread():
    rows = [*ROWS, row("b", "fast without sinks", 50.0, peer=("fast", 60.0))]
    figure = times.costs_figure(rows, ["a", "b", "c"])
    check_figure(figure)
    [trace] = figure.data
    assert list(trace.x) == [pytest.approx(100 / 99), pytest.approx(20.0)] and list(trace.y) == [0, 1]
    assert list(trace.marker.symbol) == ["circle-open", "circle"]
    assert list(trace.error_x.array) == [pytest.approx(3.0), pytest.approx(2.0)]
    assert list(figure.layout.yaxis.ticktext) == ["a", "b"] and "1 of 2 pairs" in figure.layout.title.text
    assert times.costs_table(rows, beyond=True).frame["case"].tolist() == ["b"]
    far = times.costs_figure([row("a", "x", 100.0), row("a", "x without sinks", 90.0, peer=("x", 100.0), spread=2.1)],
                             ["a"])
    assert [note.text for note in far.layout.annotations] == ["± 210 % →"] and max(far.layout.xaxis.range) == 50
    assert "No pair is recorded" in times.costs_figure([], ["a"]).layout.title.text


def test_what_is_left_when_only_named_kernels_with_sinks_count():
    rows = times.with_sinks([*ROWS, row("a", "auto (fast)", 100.0)])
    assert {r["backend"] for r in rows} == {"fast", "slow", "broken"}


def test_a_long_reason_is_cut_between_words():
    long = row("a", "broken", None, failed="the module " * 30)
    shown = times.times_table([long], ["a"]).frame["time, us"][0]
    assert shown.endswith("module ...") or shown.endswith("the ...")
    assert len(shown) <= times.LONGEST + len("failed:  ...")


def test_the_figure_draws_per_cent_of_the_bound_and_leaves_out_the_bare_kernels():
    figure = times.bound_figure(ROWS, ["a", "b", "c"])
    found = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data}
    assert found == {"fast": {"a": 50.0, "b": pytest.approx(83.3333)}, "slow": {"a": 25.0}}
    assert "2 of 3 cases recorded; the best reaches 83 %" in figure.layout.title.text
    assert "None of 1 cases is recorded yet" in times.bound_figure([], ["a"]).layout.title.text


def test_the_provenance_names_machine_versions_and_statistic():
    line = times.provenance(ROWS)
    for part in ("NVIDIA H200, driver 1.2", "torch 2, triton 3", "64 query heads over 8", "9 readings, median",
                 "2026-01-02"):
        assert part in line
    assert times.provenance([]) == "no rows"


def test_what_is_recorded_is_shown_whole():
    rows = results.read_rows(results.recorded_folder(), suite="attention")
    every = [name for form in ("prefill", "paged_prefill", "decode") for name in times.cases(form)]
    assert sorted(every) == sorted(case.name for case in bench.CASES)
    frame = times.times_table(rows, every).frame
    assert set(frame["case"]) == set(every)
    missing = set(frame["case"][frame["backend"] == "not recorded yet"])
    assert missing == set(every) - {r["case"] for r in rows if r["metric"] == "microseconds"}


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows, why = times.live()
    assert rows == [] and "no GPU" in why


@pytest.mark.parametrize(("name", "capability", "gluon", "bound"), [
    ("NVIDIA H200", (9, 0), True, 7.0), ("NVIDIA A100", (8, 0), False, None)])
def test_live_rows_come_from_the_benchmark_and_the_bound_is_the_h200s(monkeypatch, name, capability, gluon, bound):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(bench, "measure", lambda case, backends, repetitions, build: asked.append(
        (case.form, tuple(backends), build)) or [row(case.name, "triton", 9.0, bound=7.0)])
    rows, what = times.live()
    assert [r["bound"] for r in rows] == [bound, bound] and name in what
    assert asked == [("prefill", ("gluon", "triton") if gluon else ("triton",), False), ("decode", ("triton",), False)]
