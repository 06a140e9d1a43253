"""The example row: what each reading and each place of the sink gives, and that the figures say so."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_kernels.attention import steps
from gptoss_lab.viz import attention_mass, attention_splits, attention_steps, attention_streaming, style
from gptoss_lab.viz.attention_steps import LOGITS, SINK, VALUES

NUMBER = st.floats(-30, 30)
ROW = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=12)
FIGURES = {
    "readings": lambda: attention_steps.readings_figure(LOGITS, VALUES, SINK),
    "steps": lambda: attention_steps.steps_figure(*attention_steps.example_row(24), 0.0, 4),
    "places": lambda: attention_splits.places_figure(LOGITS, VALUES, SINK, 2, 2),
    "error": lambda: attention_splits.error_figure(LOGITS, VALUES, SINK, 16),
    "share": lambda: attention_mass.share_figure((0.0, 3.0), 128, 8192),
    "position": lambda: attention_mass.position_figure(torch.rand(4, 20, 8), [True, False] * 2, 8, "live", "a model"),
    "streaming": lambda: attention_streaming.figure(attention_streaming.example_logits(400, 7.0), 64, 7.0),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_titled_marked_labelled_and_small(name):
    figure = FIGURES[name]()
    assert len(figure.layout.title.text) > 10
    assert figure.layout.title.subtitle.text.split(" · ")[0] in style.ORIGINS
    for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
        assert axis.title.text or (axis.matches is not None and axis.showticklabels is False)
    text = figure.to_json()
    assert "NaN" not in text and len(text) < 60_000


def test_the_printed_formula_changes_nothing_and_one_more_logit_does():
    assert attention_steps.printed_formula(LOGITS, VALUES, SINK) == pytest.approx(34.926527, abs=1e-6)
    assert attention_steps.one_more_logit(LOGITS, VALUES, -math.inf) == pytest.approx(34.926527, abs=1e-6)
    assert attention_steps.one_more_logit(LOGITS, VALUES, SINK) == pytest.approx(32.126854, abs=1e-6)


@given(ROW, NUMBER)
def test_the_sink_is_a_gate_on_the_sinkless_output(pairs, sink):
    logits, values = [z for z, _ in pairs], [v for _, v in pairs]
    lse = torch.logsumexp(torch.tensor(logits, dtype=torch.float64), 0).item()
    bare = attention_steps.one_more_logit(logits, values, -math.inf)
    gated = bare * attention_steps.gate(lse, sink)
    assert gated == pytest.approx(attention_steps.one_more_logit(logits, values, sink), abs=1e-9)
    assert attention_steps.gate(lse, -math.inf) == 1.0


def test_the_steps_table_starts_at_the_virtual_key_and_ends_at_the_output():
    frame = attention_steps.steps_table(LOGITS, VALUES, SINK, 1).frame
    assert frame.iloc[0].tolist() == ["the sink", "", "2", "1.000000", "0.000000", "0.000000"]
    assert frame["m"].tolist() == ["2", "2", "2", "3", "4"]
    assert frame["old sums times"].tolist()[1:] == ["1.000000", "1.000000", "0.367879", "0.367879"]
    assert frame["acc / den"].iloc[-1] == "32.126854"
    assert attention_steps.steps_table(LOGITS, VALUES, -math.inf, 4).frame.iloc[0, 0] == "nothing"
    assert attention_steps.steps_table(LOGITS, VALUES, -math.inf, 4).frame["acc / den"].iloc[-1] == "34.926527"


@pytest.mark.parametrize(("block", "count"), [(1, 24), (5, 5), (24, 1)])
def test_the_steps_figure_ends_at_the_exact_output_for_every_block(block, count):
    logits, values = attention_steps.example_row(24)
    figure = attention_steps.steps_figure(logits, values, 1.0, block)
    path = next(t for t in figure.data if t.name == "acc / den so far")
    assert len(path.x) == count + 1 and path.x[-1] == 24
    assert path.y[-1] == pytest.approx(attention_steps.one_more_logit(logits, values, 1.0), abs=1e-12)


@given(st.integers(0, 20), st.integers(1, 12), st.data())
def test_cuts_rise_from_the_first_to_the_last_key(keys, splits, data):
    first = data.draw(st.integers(0, keys))
    found = attention_splits.cuts(keys, splits, first)
    assert len(found) == splits - 1 and sorted(found) == found
    assert all(first <= cut <= keys for cut in found) and (splits == 1 or found[0] == first)


@pytest.mark.parametrize(("splits", "first"), [(0, 0), (2, 5), (2, -1)])
def test_cuts_that_cannot_be_are_refused(splits, first):
    with pytest.raises(ValueError, match=r"at least 1 split and a cut of 0\.\.4"):
        attention_splits.cuts(4, splits, first)


@given(ROW, NUMBER, st.integers(1, 7))
def test_the_closed_form_is_what_counting_per_split_gives(pairs, sink, splits):
    logits, values = [z for z, _ in pairs], [v for _, v in pairs]
    walked = steps.split_attention(logits, values, sink, attention_splits.cuts(len(pairs), splits, 0), "every split")
    assert walked == pytest.approx(attention_splits.counted(logits, values, sink, splits), abs=1e-9)
    once = attention_splits.counted(logits, values, sink, 1)
    assert once == pytest.approx(attention_steps.one_more_logit(logits, values, sink), abs=1e-9)


@pytest.mark.parametrize("first", range(5))
def test_the_places_figure_shows_three_right_outputs_and_the_wrong_one(first):
    figure = attention_splits.places_figure(LOGITS, VALUES, SINK, 2, first)
    texts = [note.text for note in figure.layout.annotations]
    assert texts == [f"<b>{out}</b>" for out in ("32.126854", "32.126854", "32.126854", "29.742711")]
    sinks = [sum(text == "s" for text in row.text) for row in figure.data]
    assert sinks == [1, 1, 1, 2]
    keys = [[t for t in row.text if t in "1234"] for row in figure.data]
    assert keys == [["1", "2", "3", "4"]] * 4


def test_with_one_split_no_place_is_wrong():
    figure = attention_splits.places_figure(LOGITS, VALUES, SINK, 1, 0)
    assert {note.text for note in figure.layout.annotations} == {"<b>32.126854</b>"}
    assert "every place is right" in figure.layout.title.text


@pytest.mark.parametrize("at", [[2], [0], [4], [1, 1, 3]])
def test_the_merge_table_sums_to_the_output(at):
    frame = attention_splits.merge_table(LOGITS, VALUES, SINK, at).frame
    assert frame.iloc[-1].tolist()[-1] == "32.126854" and len(frame) == len(at) + 3
    parts = frame["its den"].iloc[:-2].astype(float).sum()
    assert parts == pytest.approx(float(frame["its den"].iloc[-2]), abs=1e-5)


def test_the_share_of_a_sink_beside_equal_keys():
    alone = torch.softmax(torch.tensor([0.0] * 128 + [3.0], dtype=torch.float64), 0)[-1].item()
    assert attention_mass.share(128, 3.0) == pytest.approx(alone, abs=1e-12)
    assert attention_mass.share(0, 3.0) == 1.0 and attention_mass.share(5, -math.inf) == 0.0


def test_the_position_figure_averages_each_kind_of_layer():
    mass = torch.zeros(4, 3, 2)
    mass[0], mass[2], mass[1] = 0.5, 0.1, 0.25
    figure = attention_mass.position_figure(mass, [True, False, True, False], 128, "live", "x")
    found = {trace.name: list(trace.y) for trace in figure.data}
    assert found == {"full layers": [12.5] * 3, "sliding layers": [30.0] * 3}
    only = attention_mass.position_figure(mass, [False] * 4, 128, "live", "x")
    assert [trace.name for trace in only.data] == ["full layers"] * 2
    rising = torch.arange(40.0)[None, :, None].expand(1, 40, 1) / 100
    thin, broad = attention_mass.position_figure(rising, [False], 128, "live", "x").data
    assert list(thin.y)[:3] == [0.0, 1.0, 2.0] and list(broad.y)[:3] == [0.0, 0.5, 1.0] and broad.y[39] == 31.5


def test_where_the_attention_goes_when_the_first_token_is_dropped():
    logits = attention_streaming.example_logits(400, 7.0)
    everything, window, kept, learned = attention_streaming.shares(logits, 64, 7.0)
    for row in (everything, window, kept, learned):
        assert row.sink + row.first + row.window + row.middle == pytest.approx(1, abs=1e-12)
    full = torch.softmax(logits, 0)
    assert everything.first == pytest.approx(full[:4].sum().item()) and everything.sink == 0
    assert window.window == pytest.approx(1) and window.first == window.middle == 0
    assert kept.middle == 0 and kept.first > everything.first
    keys = torch.logsumexp(logits[-64:], 0).item()
    assert learned.sink == pytest.approx(1 - attention_steps.gate(keys, 7.0)) and learned.first == 0


def test_a_window_that_drops_nothing_is_refused():
    with pytest.raises(ValueError, match="68 keys; more than 68"):
        attention_streaming.shares(torch.zeros(68, dtype=torch.float64), 64, 1.0)
