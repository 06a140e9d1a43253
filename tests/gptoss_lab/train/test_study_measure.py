"""Rows held once change nothing; readings and answers are those of the trained model; divergences are right."""
import math

import pytest
import torch

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.model import load_model
from gptoss_lab.train.batches import pack
from gptoss_lab.train.dialogues import prompt_of
from gptoss_lab.train.served import writer as trained_writer
from gptoss_lab.train.study import measure
from gptoss_lab.train.study.source import Rows, find_rows
from gptoss_lab.train.study.variants import BASELINE, PLAIN, VARIANTS, build
from gptoss_lab.train.trainees import next_token_scores

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(studied):
    return build(BASELINE, studied.forms, studied.rows, (), CPU, torch.float32)


@pytest.fixture(scope="module")
def reading(studied, model):
    return measure.read(model, studied.rendered, studied.rows, 4)


def test_rows_are_the_trained_ones_and_one_for_the_rest(studied):
    rows = studied.rows
    assert rows.kept == tuple(studied.vocabulary.token_ids.tolist()) and rows.others == studied.vocabulary.others
    assert rows.count == studied.vocabulary.rows == len(rows.tokens) and float(rows.offset()[-1]) == pytest.approx(
        math.log(rows.others))
    ids = studied.rendered[0].ids
    assert rows.compact(ids) == studied.vocabulary.compact(ids).tolist() and rows.full(rows.compact(ids)) == ids
    shared = rows.full([rows.count - 1])[0]
    assert shared not in rows.kept and all(i in rows.kept for i in range(shared))


def test_rows_that_differ_are_all_kept():
    class Source:
        class config:
            vocab_size = 40

        def tensor(self, name):
            return torch.arange(40.0)[:, None] if name == "lm_head.weight" else torch.zeros(40, 3)

    rows = find_rows(Source())
    assert rows == Rows(tuple(range(40)), 40) and rows.count == 40 and rows.others == 0
    assert float(rows.offset().abs().max()) == 0 and rows.compact([7]) == rows.full([7]) == [7]


def test_rows_held_once_give_the_whole_model_s_probabilities(studied, model):
    whole = load_model(studied.forms.path("mxfp4"), CPU, torch.float32, backends=PLAIN)
    ids = studied.rendered[1].ids[:60]
    with torch.inference_mode():
        full = torch.log_softmax(whole(torch.tensor(ids), logits="all").double(), dim=-1)
        rows = torch.tensor(studied.rows.compact(ids))
        mine = torch.log_softmax(model(rows, logits="all").double() + studied.rows.offset(), dim=-1)
    kept = torch.tensor(studied.rows.kept)
    assert torch.allclose(mine[:, :-1], full[:, kept], atol=1e-5, rtol=0)
    rest = full.exp().sum(1) - full[:, kept].exp().sum(1)
    assert torch.allclose(mine[:, -1].exp(), rest, atol=1e-5, rtol=0)


def test_the_loss_is_the_trained_model_s(studied, reading):
    right = next_token_scores(studied.trained, [pack(studied.rendered, studied.vocabulary)], "reference")
    assert sum(reading.counts) == right["tokens"]
    assert sum(reading.losses) / sum(reading.counts) == pytest.approx(right["loss"], rel=1e-5)
    assert len(reading.losses) == len(reading.log_probabilities) == len(studied.rendered)


def test_a_reading_does_not_depend_on_its_chunks(studied, model, reading, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK_LOGITS", studied.rows.count)
    alone = measure.read(model, studied.rendered, studied.rows, 4, reading)
    assert alone.losses == pytest.approx(reading.losses, rel=1e-5) and alone.counts == reading.counts
    assert alone.experts_unchanged(reading)[1] == alone.experts.shape[0] * sum(len(d.ids) for d in studied.rendered)


def test_the_divergence_from_itself_is_0(studied, model, reading):
    again = measure.read(model, studied.rendered, studied.rows, 4, reading)
    assert again.divergences == [0.0] * len(studied.rendered) and again.losses == reading.losses
    assert again.experts_unchanged(reading) == (again.experts[..., 0].numel(),) * 2
    assert again.log_probabilities == []


def test_divergences_and_changed_experts_against_their_formulas(studied, reading):
    variant = next(v for v in VARIANTS if v.name == "sinks ignored")
    other = build(variant, studied.forms, studied.rows, (), CPU, torch.float32)
    found = measure.read(other, studied.rendered, studied.rows, 4, reading)
    mine = measure.read(other, studied.rendered, studied.rows, 4)
    for divergence, p, q in zip(found.divergences, reading.log_probabilities, mine.log_probabilities, strict=True):
        right = torch.nn.functional.kl_div(q.double(), p.double(), log_target=True, reduction="sum")
        assert divergence == pytest.approx(float(right), rel=1e-6, abs=1e-9) and divergence > 0
    same = sum(set(a) == set(b) for a, b in zip(
        found.experts.flatten(0, 1).tolist(), reading.experts.flatten(0, 1).tolist(), strict=True))
    assert found.experts_unchanged(reading) == (same, found.experts[..., 0].numel()) and same < found.experts.shape[
        0] * found.experts.shape[1]


def test_only_what_fits_is_kept(studied, model, monkeypatch):
    monkeypatch.setattr(measure, "KEPT_BYTES", 0)
    none = measure.read(model, studied.rendered[:2], studied.rows, 4)
    assert none.log_probabilities == [] and len(none.losses) == 2
    assert measure.read(model, studied.rendered[:2], studied.rows, 4, none).divergences == []


def test_the_engine_writes_what_the_trained_model_writes(studied, model):
    prompts = [prompt_of(d) for d in studied.dialogues]
    mine = measure.writer(model, studied.rows, 10, 3)(prompts)
    theirs = trained_writer(studied.trained, studied.vocabulary, 10, "reference")(prompts)
    assert len(mine) == len(prompts) and len(set(map(tuple, mine))) > 1
    own = [(a, b) for a, b in zip(mine, theirs, strict=True) if all(t in studied.rows.kept for t in a)]
    assert len(own) >= 4 and all(a == b for a, b in own)


def test_the_source_s_layout_does_not_matter(studied, reading):
    assert open_checkpoint(studied.forms.path("fp8")).layout == "fp8"
    exact = next(v for v in VARIANTS if v.form == "fp8")
    found = measure.read(build(exact, studied.forms, studied.rows, (), CPU, torch.float32), studied.rendered,
                         studied.rows, 4, reading)
    assert found.divergences == [0.0] * len(studied.rendered)
