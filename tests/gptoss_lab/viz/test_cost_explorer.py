"""The explorer: figure and text of one choice, controls that move both, an answer within 200 ms."""
import time
from dataclasses import replace

import pytest

from gptoss_lab import results
from gptoss_lab.cost import Plan
from gptoss_lab.cost.sweep import NODE_PLANS
from gptoss_lab.viz import cost_explorer, explore
from gptoss_lab.viz.cost_explorer import Choice, Explorer, controls, show

LIMIT_SECONDS = 0.2
RECORDED = results.read_rows(results.recorded_folder())
EXPLORER = Explorer([r for r in RECORDED if r["suite"] == "attention" or r["case"].startswith("ceiling")])
"""A state in which no engine has been measured."""


def test_the_chosen_point_lies_where_its_curve_is_and_the_parts_add_up():
    choice = Choice(plan=Plan(4, 1, 4), batch=32)
    figure = EXPLORER.figure(choice)
    chosen = next(trace for trace in figure.data if trace.name == "chosen")
    curve = next(trace for trace in figure.data if trace.name == "EP4")
    assert (chosen.x[0], chosen.y[0]) in set(zip(curve.x, curve.y, strict=True))
    modelled = next(trace for trace in figure.data if trace.name == "modelled")
    assert sum(modelled.x) / 1e3 == pytest.approx(1 / chosen.x[0])
    assert f"{chosen.x[0]:,.0f} tokens/s per user" in figure.layout.title.text


@pytest.mark.parametrize("by", ["kernels alone", "the published system", cost_explorer.BOUND])
def test_hover_holds_every_part(by):
    choice = Choice(phase="prefill", batch=1, by=by)
    bars = [trace for trace in EXPLORER.figure(choice).data if trace.type == "bar"]
    assert len(bars) == 2 and len(bars[0].y) >= 4
    assert sum(bars[0].customdata) == pytest.approx(100)
    assert "% of the pass" in bars[0].hovertemplate


@pytest.mark.parametrize(("change", "reason"), [
    ({"by": "the published system"}, "its decode charts were not published as numbers"),
    ({"weights": "mxfp4"}, "no measurement to calibrate from touches experts_mxfp4"),
])
def test_what_no_model_answers_is_a_figure_that_says_why(change, reason):
    figure = EXPLORER.figure(replace(Choice(), **change))
    assert figure.layout.title.text == "No model answers this" and reason in figure.layout.annotations[0].text


def test_what_does_not_fit_is_said_in_title_and_text():
    choice = Choice(plan=Plan(), batch=128)
    assert "does not fit into memory" in EXPLORER.figure(choice).layout.title.text
    assert "does not fit in 141.0 GB" in EXPLORER.words(choice)


def test_the_text_holds_every_answer_with_its_mark():
    text = EXPLORER.words(Choice(phase="prefill", batch=1))
    for part in ("bound", "not measured yet", "published", "165.00 ms", "kernels alone", "modelled",
                 "median error 3.8 %"):
        assert part in text


def test_a_recorded_step_is_shown_and_its_formats_are_named():
    text = Explorer(RECORDED).words(Choice(plan=Plan(), batch=1))
    assert "fp8 experts, fp8 projections" in text and "not measured yet" not in text


def test_names_of_calibrations_are_those_that_can_answer():
    assert EXPLORER.names() == ["kernels alone", "the published system", "bound"]
    assert Explorer([]).names() == ["kernels alone", "the published system", "bound"]


def test_controls_hold_the_choice_and_all_thirty_plans():
    choice = Choice(model="gpt-oss-20b", plan=Plan(8, 2, 4), batch=64, usd_per_gpu_hour=4.5)
    made = controls(choice, EXPLORER.names())
    assert {name: control.value for name, control in made.items()} == {
        name: getattr(choice, name) for name in made}
    assert [plan for _, plan in made["plan"].options] == list(NODE_PLANS)


@pytest.fixture
def shown(monkeypatch):
    """What `show` displayed: figures as the JSON that leaves for a front end, and the bundle of the widget."""
    out = []
    monkeypatch.setattr(cost_explorer, "display",
                        lambda what, raw=False: out.append(what if raw else what.to_json()))
    return out


def test_a_moved_control_changes_figure_and_text(shown):
    widgets = show(EXPLORER, Choice(), "What it shows.")
    assert shown[1]["text/plain"] == "What it shows." and shown[1][explore.VIEW]["model_id"]
    for name, value in (("batch", 64), ("plan", Plan(8, 1, 8)), ("tokens", 32768), ("usd_per_gpu_hour", 5.0),
                        ("model", "gpt-oss-20b"), ("utilisation", 0.5), ("by", "bound"), ("weights", "mxfp4"),
                        ("phase", "prefill"), ("kv", "fp8")):
        figure, text = shown[-1] if len(shown) > 2 else shown[0], widgets["text"].value
        widgets[name].value = value
        assert shown[-1] != figure, name
        assert widgets["text"].value != text or name in ("by",), name


def test_a_moved_slider_is_answered_within_200_ms(shown):
    """Figure, its JSON and the text; CPU time, the median of ten moves, so that a busy machine does not decide."""
    widgets = show(EXPLORER, Choice(plan=Plan(8, 2, 4)), "What it shows.")
    spent = []
    for batch in (1, 2, 4, 8, 16, 64, 128, 32, 16, 8):
        begin = time.process_time()
        widgets["batch"].value = batch
        spent.append(time.process_time() - begin)
    assert sorted(spent)[len(spent) // 2] < LIMIT_SECONDS
    assert len(shown) == 12


def test_a_widget_without_a_sentence_is_refused(shown):
    with pytest.raises(ValueError, match="sentence"):
        show(EXPLORER, Choice(), " ")
    assert shown == []
