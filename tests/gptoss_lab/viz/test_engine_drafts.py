"""Who drafts in the lessons: nano's own draft and heads where they were trained, else copies; and what they gain."""
import dataclasses

import pytest
import torch

from gptoss_lab.bench.speculation_drafts import Pair
from gptoss_lab.checkpoint import ensure_nano, synth
from gptoss_lab.checkpoint.nano import trained_nano
from gptoss_lab.config import preset
from gptoss_lab.cost.speculation import StepSeconds
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.model import load_model
from gptoss_lab.viz import engine_acceptance, engine_drafts, engine_speedup

needs_training = pytest.mark.skipif(trained_nano() is None, reason="this checkout has no trained nano")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = dataclasses.replace(preset("nano"), name="tiny", num_layers=2, hidden_size=32, intermediate_size=32,
                                 num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=50, sliding_window=16,
                                 eos_token_ids=(3,), pad_token_id=0)
    path = tmp_path_factory.mktemp("drafts") / "model"
    synth(config, path)
    return load_model(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def nano():
    return load_model(ensure_nano(), dtype=torch.float32)


def test_without_trained_ones_a_copy_and_random_heads_that_change_no_token(tiny):
    draft, kind = engine_drafts.draft_for(tiny)
    assert kind == "a copy with noise 0.05" and draft.config == tiny.config
    heads, kind = engine_drafts.heads_for(tiny)
    assert kind == "random" and len(heads) == 2
    plain = engine_acceptance.plain(tiny, [[1, 2, 3]], 16)
    for counts, tokens in (engine_acceptance.measure(tiny, draft, [[1, 2, 3]], 3, 16),
                           engine_acceptance.measure_heads(tiny, heads, [[1, 2, 3]], 16)):
        assert tokens == plain and counts.rounds > 0


@needs_training
def test_nanos_draft_stands_wholly_where_it_was_trained_and_partly_elsewhere(nano):
    draft, kind = engine_drafts.draft_for(nano)
    heads, also = engine_drafts.heads_for(nano)
    assert kind == also == "trained for the nano checkpoint" and draft.config.num_layers == 3 and len(heads) == 2
    for name, questions in engine_drafts.ASKED.items():
        prompts = engine_drafts.prompts(questions[:2])
        plain = engine_acceptance.plain(nano, prompts, 20)
        counts, tokens = engine_acceptance.measure(nano, draft, prompts, 4, 20)
        by_heads, others = engine_acceptance.measure_heads(nano, heads, prompts, 20)
        assert tokens == others == plain
        assert 0.2 < by_heads.acceptance < 0.95
        if name == "sums as in its training":
            assert counts.acceptance == 1
        else:
            assert 0.2 < counts.acceptance < 0.95


def test_a_gain_is_timed_and_leaves_no_trace(tiny):
    found = engine_speedup.timed(Pair(tiny, tiny), [[1, 2, 3, 4, 5]], 3, 12, turns=1)
    assert min(found.steps.target, found.steps.draft, found.steps.verify, found.measured, found.predicted) > 0
    assert found.counts.acceptance == 1 and found.draft_tokens == 3


def test_drafts_that_change_a_token_are_an_error(tiny, monkeypatch):
    runs = iter([(1.0, [[1]]), (1.0, [[2]])])
    monkeypatch.setattr(engine_speedup, "clocked", lambda *_: next(runs))
    with pytest.raises(RuntimeError, match="not those without"):
        engine_speedup.timed(Pair(tiny, tiny), [[1, 2, 3]], 3, 12)


def test_the_table_predicts_from_what_it_shows():
    counts = Acceptance()
    for accepted in (4, 4, 1):
        counts.add(4, accepted)                                          # 9 of 10 tested stand
    gain = engine_speedup.Gain(4, StepSeconds(0.02, 0.005, 0.03), counts, 1.5)
    row = engine_speedup.gains_table({"a draft": gain}).frame.iloc[0].tolist()
    assert row == ["a draft", "4", "0.90", "4.00", "20.0", "5.0", "30.0", f"{4.0951 * 0.02 / 0.05:.2f}", "1.50", "live"]


@needs_training
def test_another_nano_gets_neither_draft_nor_heads():
    """Its name and shape are not enough: one final norm that differs in a number is another model's."""
    for dtype in (torch.bfloat16, torch.float32):
        other = load_model(ensure_nano(), dtype=dtype)
        assert engine_drafts.is_trained_nano(other)
    with torch.no_grad():
        other.norm.weight[0] += 1
    assert engine_drafts.draft_for(other)[1] == "a copy with noise 0.05"
    assert engine_drafts.heads_for(other)[1] == "random"
