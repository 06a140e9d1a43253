"""The published prefill table: complete, consistent with itself, above the bound, and of the form b n + c n^2."""
from dataclasses import replace

import pytest

from gptoss_lab.cost import CostError, Plan
from gptoss_lab.cost.published import (
    PublishedRow,
    beside_bound,
    fit_prefill,
    published_path,
    read_published,
)

ROWS = read_published()
LENGTHS = (8192, 32768, 65536, 128000)


def test_the_table_has_its_32_rows():
    expected = [(m, Plan(n, 1, n), t) for m in ("gpt-oss-120b", "gpt-oss-20b") for n in (1, 2, 4, 8) for t in LENGTHS]
    assert [(row.model, row.plan, row.input_tokens) for row in ROWS] == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.model}-{r.plan.world}-{r.input_tokens}")
def test_printed_cost_follows_from_printed_latency(row):
    assert row.agrees
    usd = row.plan.world * 3.00 / 3600 / row.input_tokens * 1e6
    slack = 0.0005 * usd + 0.0005
    assert abs(row.latency_s * usd - row.usd_per_million_input_tokens) <= slack * (1 + 1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.model}-{r.plan.world}-{r.input_tokens}")
def test_a_cost_beyond_the_rounding_or_of_another_plan_is_noticed(row):
    usd = row.plan.world * 3.00 / 3600 / row.input_tokens * 1e6
    allowed = 0.0005 * usd + 0.0005
    for side in (-1, 1):
        right, wrong = (row.latency_s * usd + side * part * allowed for part in (0.999, 1.001))
        assert replace(row, usd_per_million_input_tokens=right).agrees
        assert not replace(row, usd_per_million_input_tokens=wrong).agrees
    assert not replace(row, plan=Plan(1, 1, 2 * row.plan.world)).agrees


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.model}-{r.plan.world}-{r.input_tokens}")
def test_no_published_latency_beats_the_bound(row):
    beside = beside_bound(row)
    assert beside["published_s"] > beside["bound_s"] > 0
    assert beside["published_over_bound"] == pytest.approx(row.latency_s / beside["bound_s"])
    ratio = beside["published_usd_per_million"] / beside["bound_usd_per_million"]
    assert ratio == pytest.approx(beside["published_over_bound"], rel=0.03)     # the printed costs have two digits


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_one_gpu_latencies_are_linear_plus_quadratic(model):
    fit = fit_prefill(ROWS, model)
    assert fit.worst_relative_error < 0.01
    assert fit.linear_flop_per_second == pytest.approx(265e12, rel=0.015)
    assert fit.attention_flop_per_second == pytest.approx(124e12, rel=0.015)
    assert fit.attention_flop_per_second_if_window_ran_full == pytest.approx(247e12, rel=0.015)


def test_the_fit_finds_the_numbers_a_latency_was_made_of():
    b, c = 3e-5, 1e-9
    made = [PublishedRow("gpt-oss-20b", Plan(), n, b * n + c * n * n, 1.0) for n in LENGTHS]
    fit = fit_prefill(made, "gpt-oss-20b")
    assert (fit.b_seconds_per_token, fit.c_seconds_per_token_squared) == pytest.approx((b, c), rel=1e-9)
    assert fit.worst_relative_error < 1e-9
    assert fit.seconds(16384) == pytest.approx(b * 16384 + c * 16384**2, rel=1e-9)
    with pytest.raises(CostError, match="0 one-GPU rows of gpt-oss-120b"):
        fit_prefill(made, "gpt-oss-120b")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_s", "latency_ms", "columns"),
        ("0.364", "fast", "line 2: could not convert"),
        ("gpt-oss-120b,1,1,1,8192", "gpt-oss-7b,1,1,1,8192", "line 2: no preset"),
        ("gpt-oss-120b,1,1,1,8192", "gpt-oss-120b,3,1,1,8192", "line 2: ep 3 does not divide"),
    ],
)
def test_a_broken_table_is_named(tmp_path, old, new, message):
    file = tmp_path / "prefill.csv"
    file.write_text(published_path().read_text().replace(old, new, 1))
    with pytest.raises(CostError, match=message):
        read_published(file)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(CostError, match="cannot read the published table nothing.csv"):
        read_published(tmp_path / "nothing.csv")
