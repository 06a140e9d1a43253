"""Heads: what they see, that they learn, and their file."""
import numpy as np
import torch
from safetensors import safe_open
from trained import TINY, random_model

from gptoss_lab.train.batches import Batch
from gptoss_lab.train.mtp import PredictionHeads, heads_loss, save_heads
from gptoss_lab.train.optimiser import Optimiser
from gptoss_lab.train.trainees import HeadsTrainee


def batch():
    rows = np.tile(np.array([1, 5, 9, 2, 7], dtype=np.int32), 12)
    return Batch(rows, np.arange(60, dtype=np.int32), np.ones(60, dtype=bool), [0, 60])


def test_the_arithmetic_is_what_the_text_says():
    heads = PredictionHeads(8, 1e-5, heads=2)
    hidden, embedded = torch.randn(3, 8), torch.randn(3, 2, 8)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    z = hidden
    with torch.no_grad():
        for j, state in enumerate(heads(hidden, embedded)):
            head = heads.heads[j]
            u = torch.cat([rms(z), rms(embedded[:, j])], dim=-1)
            z = z + torch.nn.functional.silu(u @ head["expand"].t()) @ head["project"].t()
            assert torch.allclose(state, rms(z) * head["norm"], atol=1e-6)


def test_head_two_sees_two_tokens_and_head_one_only_one():
    heads, hidden, embedded = PredictionHeads(8, 1e-5), torch.randn(3, 8), torch.randn(3, 2, 8)
    changed = embedded.clone()
    changed[:, 1] += 1
    (a1, a2), (b1, b2) = heads(hidden, embedded), heads(hidden, changed)
    assert torch.equal(a1, b1) and not torch.allclose(a2, b2)


def test_a_repeating_text_is_learned_and_the_model_untouched():
    model, heads = random_model(), PredictionHeads(TINY.hidden_size, 1e-5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainee = HeadsTrainee(heads, model, "reference")
    optimiser = Optimiser(heads.named_parameters(), muon=0.0, adamw=0.01)
    for _ in range(30):
        loss, scalars = trainee.loss(batch(), quantised=True)
        loss.backward()
        optimiser.step(1.0)
    assert scalars["accuracy_2"] == 1 and scalars["accuracy_3"] == 1 and loss.item() < 0.1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_targets_are_two_and_three_ahead(monkeypatch):
    model, heads = random_model(), PredictionHeads(TINY.hidden_size, 1e-5)
    asked = []
    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr("gptoss_lab.train.mtp.functional.cross_entropy",
                        lambda logits, target: asked.append(target.tolist()) or cross_entropy(logits, target))
    rows = torch.arange(10)
    heads_loss(heads, model, torch.randn(10, TINY.hidden_size), rows, [torch.tensor([0, 4]), torch.tensor([1])])
    assert asked == [[2, 6], [4]]


def test_the_file(tmp_path):
    heads = PredictionHeads(224, 1e-5)
    save_heads(heads, tmp_path / "mtp.safetensors")
    assert (tmp_path / "mtp.safetensors").stat().st_size < 8_000_000
    with safe_open(tmp_path / "mtp.safetensors", "pt") as file:
        assert file.metadata()["heads"] == "2"
        assert torch.equal(file.get_tensor("heads.1.expand"), heads.heads[1]["expand"].detach().bfloat16())
        assert len(file.keys()) == 6
