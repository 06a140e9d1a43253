"""Greedy generation in training is the engine's, token by token, through the file, in both layouts."""
import torch
from trained import TINY, random_model, vocabulary

from gptoss_lab.checkpoint.compact import write_compact
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.generate import _batches, greedy
from gptoss_lab.train.served import served_agreement


def test_the_served_model_writes_the_same(tmp_path):
    model, kept = random_model(seed=4), vocabulary()
    file = write_compact(tmp_path / "m.safetensors", TINY, torch.from_numpy(kept.token_ids), released_tensors(model))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, TINY.vocab_size, (n,), generator=generator).tolist() for n in (1, 5, 30, 70)]
    found = served_agreement(file, model, kept, prompts, 24)
    assert {layout: s["right"] for layout, s in found.items()} == {"hf": 4, "original": 4}
    with torch.no_grad():
        model.get_parameter("layers.1.out").mul_(-1)
    assert served_agreement(file, model, kept, prompts, 24)["hf"]["right"] < 4


def test_a_stop_ends_a_sequence_and_the_others_go_on():
    model = random_model(seed=4)
    free = greedy(model, [[1, 2, 3], [4, 5]], frozenset(), 12)
    assert [len(a) for a in free] == [12, 12]
    stop = free[0][3]
    stopped = greedy(model, [[1, 2, 3], [4, 5]], frozenset({stop}), 12)
    assert stopped[0] == free[0][: free[0].index(stop) + 1]
    assert stopped[1] == free[1][: free[1].index(stop) + 1 if stop in free[1] else 12]


def test_alone_or_together_is_the_same():
    model = random_model(seed=5)
    prompts = [[1, 2, 3] * 9, [4], [7] * 40]
    assert greedy(model, prompts, frozenset(), 10) == [greedy(model, [p], frozenset(), 10)[0] for p in prompts]


def test_batches_hold_every_prompt_once_and_fit(monkeypatch):
    monkeypatch.setattr("gptoss_lab.train.generate.CACHE_TOKENS", 100)
    lengths = [5, 60, 3, 20, 20, 200]
    batches = _batches(lengths, 10)
    assert sorted(i for b in batches for i in b) == list(range(6))
    assert all(len(b) == 1 or len(b) * (max(lengths[i] for i in b) + 10) <= 100 for b in batches)
