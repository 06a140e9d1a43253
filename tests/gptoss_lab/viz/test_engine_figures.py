"""Figures of the engine: the example holds everything it is meant to show, and what is drawn is what was recorded."""
import dataclasses

import pytest
import torch

from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, PromptError, SamplingParams
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.timeline import KINDS
from gptoss_lab.model import load_model
from gptoss_lab.viz import engine_acceptance, engine_graphs, engine_memory, engine_timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, sliding_window=16, eos_token_ids=(3,),
                                 pad_token_id=0)
    path = tmp_path_factory.mktemp("figures") / "model"
    synth(config, path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def timeline(model):
    return engine_timeline.example(model)


def test_the_example_shows_all_that_a_scheduler_does(timeline):
    seen = {entry.kind for step in timeline.steps for entry in step.entries}
    assert seen == set(KINDS)
    mixed = [step for step in timeline.steps if {"prefill", "decode"} <= {entry.kind for entry in step.entries}]
    assert len(mixed) >= 3 and 30 <= len(timeline.steps) <= 60
    ended = engine_timeline.totals(timeline).frame["ended"].tolist()
    assert ended == ["length"] * 4 + ["cancelled", "length"]
    found = [int(n) for n in engine_timeline.totals(timeline).frame["tokens found"]]
    assert [n for s, n in enumerate(found) if s != 4] == [14, 24, 6, 12, 8] and found[4] < 10


def test_the_figure_draws_the_record(timeline):
    fig = engine_timeline.figure(timeline)
    lanes, pages = fig.data[0], fig.data[1]
    assert list(lanes.y) == [f"sequence {s}" for s in range(6)]
    for row, sequence in enumerate(range(6)):
        assert [None if z is None else KINDS[int(z)] for z in lanes.z[row]] == [
            entry and entry.kind for entry in timeline.of(sequence)]
    assert list(pages.y) == [step.pages_held for step in timeline.steps]
    assert fig.layout.title.text.startswith(f"{len(timeline.steps)} steps read ")
    assert fig.layout.title.subtitle.text.startswith("live")


def test_scrubbing_leaves_the_future_out(timeline):
    whole, part = engine_timeline.figure(timeline), engine_timeline.figure(timeline, 5)
    assert [len(row) for row in part.data[0].z] == [6] * 6
    assert part.layout.xaxis.range == whole.layout.xaxis.range
    assert len(engine_timeline.moment(timeline, 5).frame) == len(timeline.steps[5].entries)
    for step in (-1, len(timeline.steps)):
        with pytest.raises(ValueError, match="were recorded"):
            engine_timeline.figure(timeline, step)


def test_a_pool_that_is_too_small_is_refused(model):
    with pytest.raises(PromptError, match="may come to hold 75 positions, 10 pages of 8; the caches have 9"):
        engine_timeline.example(model, pages=9)


def test_spoiling_grows_with_the_noise(model):
    ids = torch.arange(12)
    exact = model(ids, logits="all")
    errors = [(engine_acceptance.spoiled(model, noise)(ids, logits="all") - exact).norm().item()
              for noise in (0.0, 0.01, 0.1)]
    assert errors[0] == 0 < errors[1] < errors[2]
    assert torch.equal(model(ids, logits="all"), exact)


def test_measured_counts_and_tokens(model):
    prompts = [[1, 2, 3], [7]]
    plain = [done.tokens for done in Engine(model).complete(
        prompts, SamplingParams(temperature=0, max_new_tokens=16))]
    assert engine_acceptance.plain(model, prompts, 16) == plain
    for noise in (0.0, 0.3):
        counts, tokens = engine_acceptance.measure(model, engine_acceptance.spoiled(model, noise), prompts, 3, 16)
        assert tokens == plain and (counts.acceptance == 1) == (noise == 0)


def test_tables_and_figures_of_counts():
    counts = Acceptance()
    for accepted in (2, 0, 1, 2):
        counts.add(2, accepted)
    row = engine_acceptance.counts_table({"a draft": counts}).frame.iloc[0].tolist()
    assert row == ["a draft", "4", "8", "5", "0.62", "0.71", "2.25", "2.22"]
    places = engine_acceptance.places_figure({"a draft": counts}, "a test")
    assert list(places.data[0].y) == [3 / 4, 2 / 3] and "71%" in places.layout.title.text
    lengths = engine_acceptance.lengths_figure({2: counts}, "a test")
    assert list(lengths.data[0].y) == [2, 3] and list(lengths.data[2].y) == [2.25]
    assert list(lengths.data[1].y) == pytest.approx([1 + 5 / 7, 1 + 5 / 7 + 25 / 49])


def test_bytes_of_a_sequence():
    frame = engine_memory.bytes_table(preset("gpt-oss-120b"), [1, 128, 129, 131_072]).frame
    assert frame["rings, bf16"].tolist() == ["73,728", "9,437,184", "9,474,048", "4,836,556,800"]
    assert frame["every position, bf16"].tolist()[-1] == "9,663,676,416"
    assert frame["rings, e4m3"].tolist()[-1] == "2,418,278,400"
    assert "holds 4.84 GB with rings, not 9.66" in engine_memory.bytes_figure(preset("gpt-oss-120b")).layout.title.text
    assert len(engine_memory.room_table(preset("gpt-oss-120b"), [10, 20], 64).frame) == 2


def test_captured_sizes():
    assert [engine_graphs.size_for(n) for n in (1, 2, 3, 5, 8, 9, 100, 128)] == [1, 2, 4, 8, 8, 16, 128, 128]
    for wrong in (0, 129):
        with pytest.raises(ValueError, match="1 to 128 are expected"):
            engine_graphs.size_for(wrong)
    fig = engine_graphs.sizes_figure()
    assert list(fig.data[0].y)[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_spare_rows_change_nothing(folder):
    assert max(engine_graphs.spare_rows_check(open_checkpoint(folder), "cpu")) < 1e-5


def test_recorded_decode_steps():
    assert engine_graphs.recorded_table([]).frame.iloc[0, 0] == "not recorded yet"
    row = {"suite": "decode", "backend": "fast", "value": 2.5,
           "conditions": {"model": "gpt-oss-20b", "batch": 8, "tokens": 8192, "eager_ms": 9.0, "replay_ms": 2.25,
                          "capture_seconds": 1.5, "capture_bytes": 3e6}}
    shown = engine_graphs.recorded_table([row, row | {"value": None}, row | {"suite": "moe"}]).frame
    assert shown.iloc[0].tolist() == ["gpt-oss-20b", "fast", "8 at 8,192", "9.00", "2.50", "2.25", "1.5", "3",
                                      "recorded"] and len(shown) == 1
