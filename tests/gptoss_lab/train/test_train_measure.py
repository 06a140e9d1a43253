"""What is measured: perplexity against the served model, agreement, balance."""
import math
from dataclasses import replace

import pytest
import torch
from trained import TINY

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.compact import expand, write_compact
from gptoss_lab.model import build_model
from gptoss_lab.train.dialogues import render_dialogue
from gptoss_lab.train.evaluate import held_out_set
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.measure import (
    attention_scores,
    busiest_expert,
    draft_agreement,
    heads_accuracy,
    packed_dialogues,
)
from gptoss_lab.train.model import SINK, TrainedModel
from gptoss_lab.train.mtp import PredictionHeads
from gptoss_lab.train.trainees import next_token_scores
from gptoss_lab.train.vocabulary import training_vocabulary

WHOLE = replace(TINY, num_layers=2, hidden_size=32, intermediate_size=32, vocab_size=201_088,
                eos_token_ids=(200002, 199999, 200012), pad_token_id=199999)


@pytest.fixture(scope="module")
def setting():
    kept = training_vocabulary(300)
    model = TrainedModel(WHOLE, kept.rows, kept.others, seed=2)
    model.store()
    dialogues = held_out_set(12, seed=5)
    return model, kept, dialogues, packed_dialogues(dialogues, kept, 700)


def test_every_dialogue_is_packed_once(setting):
    _, kept, dialogues, batches = setting
    lengths = [b - a for batch in batches for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    own = [len(render_dialogue(d).ids) for d in dialogues]
    assert len(lengths) == len(own) and all(abs(a - b) <= 4 for a, b in zip(lengths, own, strict=True))
    assert len(batches) > 1 and all(len(b.rows) <= 700 or len(b.offsets) == 2 for b in batches)


def test_perplexity_is_the_served_models(setting, tmp_path):
    """Over the full vocabulary of the expanded checkpoint, one dialogue after the other."""
    model, kept, dialogues, _ = setting
    batches = packed_dialogues(dialogues[:3], kept, 700)
    file = write_compact(tmp_path / "m.safetensors", WHOLE, torch.from_numpy(kept.token_ids), released_tensors(model))
    served = build_model(open_checkpoint(expand(file, tmp_path / "hf")), dtype=torch.float32)
    total = count = 0
    for batch in batches:
        for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            rows = torch.from_numpy(batch.rows[a:b]).long()
            known = torch.from_numpy(kept.token_ids).long()
            unknown = next(i for i in range(WHOLE.vocab_size) if i not in set(kept.token_ids[:50].tolist()))
            ids = torch.where(rows < kept.shared, known[rows.clamp(max=kept.shared - 1)], unknown)
            at = torch.from_numpy(batch.learned[a + 1 : b]).nonzero()[:, 0]
            scores = torch.log_softmax(served(ids, logits="all")[at].double(), dim=-1)
            total -= float(scores[torch.arange(len(at)), ids[at + 1]].sum())
            count += len(at)
    found = next_token_scores(model, batches, "reference")
    assert found["tokens"] == count and found["loss"] == pytest.approx(total / count, abs=1e-5)
    assert found["perplexity"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-4)


def test_a_model_agrees_with_itself_and_not_with_another(setting):
    model, kept, _, batches = setting
    other = TrainedModel(WHOLE, kept.rows, kept.others, seed=9)
    assert draft_agreement(model, model, batches, "reference") == 1.0
    assert draft_agreement(model, other, batches, "reference") < 0.5


def test_untrained_heads_are_hardly_ever_right(setting):
    model, _, _, batches = setting
    found = heads_accuracy(PredictionHeads(32, 1e-5), model, batches, "reference")
    assert len(found) == 2 and all(0 <= x < 0.1 for x in found)


def test_sinks_among_equal_scores(setting):
    """With no queries all scores are 0, so the denominator is the number of keys and exp(SINK)."""
    _, kept, dialogues, _ = setting
    model = TrainedModel(WHOLE, kept.rows, kept.others, seed=3)
    with torch.no_grad():
        for layer in model.layers:
            layer["qkv"].zero_()
    batch = packed_dialogues(dialogues[:3], kept, 700)[0]
    found = attention_scores(model, batch)
    seen = [t + 1 for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True) for t in range(b - a)]
    for layer, window in enumerate((WHOLE.sliding_window, max(seen))):
        keys = torch.tensor([min(n, window) for n in seen], dtype=torch.float64)
        shares = math.exp(SINK) / (keys + math.exp(SINK))
        assert found["sink_share"][layer] == pytest.approx(float(shares.mean()), rel=1e-5)
        assert found["largest"][layer] == pytest.approx(math.log(float(keys.max()) + math.exp(SINK)), rel=1e-5)


def test_the_busiest_expert(setting):
    model, _, _, batches = setting
    assert 1 <= busiest_expert(model, batches[0], "reference") < WHOLE.num_experts / WHOLE.experts_per_token
    saved = [layer["router_bias"].detach().clone() for layer in model.layers]
    with torch.no_grad():
        for layer in model.layers:
            layer["router_bias"][0] += 100
    assert busiest_expert(model, batches[0], "reference") == pytest.approx(
        WHOLE.num_experts / WHOLE.experts_per_token)
    with torch.no_grad():
        for layer, bias in zip(model.layers, saved, strict=True):
            layer["router_bias"].copy_(bias)
