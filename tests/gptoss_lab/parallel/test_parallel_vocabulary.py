"""Tokens from sharded logits: those that the engine's sampler takes from whole ones."""
import pytest
import torch

from gptoss_lab.engine import sampling
from gptoss_lab.engine.sampling import SamplingParams, uniform
from gptoss_lab.parallel import simulate, vocabulary
from gptoss_lab.parallel.cuts import even_ranges
from gptoss_lab.parallel.vocabulary import VocabularyShards

PARAMS = [
    SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(temperature=1.3, top_p=0.9, seed=3), SamplingParams(temperature=1.0, top_k=40, top_p=0.5, seed=4),
    SamplingParams(temperature=2.0, top_k=1, seed=5), SamplingParams(temperature=1.0, top_p=1e-9, seed=6),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.99, seed=7), SamplingParams(temperature=0.01, seed=8),
]


def make_logits(kind, vocab, rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "flat":
        logits = torch.zeros(rows, vocab)
    if kind == "ruled out":
        logits[:, ::3] = -torch.inf
    if kind == "steep":
        logits = logits * 20
    return logits


def shards(own, logits):
    group = own.group(range(own.world))
    rows = even_ranges(logits.shape[1], own.world)[own.rank]
    return VocabularyShards(rows, group), logits[:, rows.start : rows.stop]


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "ruled out", "steep"])
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 1021), (4, 131), (3, 5000), (8, 8)])
def test_as_one_rank(kind, ranks, vocab):
    logits = make_logits(kind, vocab, 2 * len(PARAMS))
    params = PARAMS * 2
    draws = [uniform(p.seed, row) for row, p in enumerate(params)]
    expected = sampling.choose(logits, params, range(len(params)))

    def own(place):
        at, part = shards(place, logits)
        drawn = at.draw(
            part, torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor([p.top_k for p in params]), torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor(draws, dtype=torch.float64))
        return at.argmax(part), drawn, at.log_sum_exp(part), at.at(part, expected), at.largest(part)

    for greedy, drawn, total, own_logit, largest in simulate(ranks, own):
        assert torch.equal(greedy, logits.argmax(dim=-1))
        assert torch.equal(drawn, expected)
        assert torch.allclose(total, logits.double().logsumexp(dim=-1), atol=1e-12)
        assert torch.allclose(own_logit - total, sampling.log_probabilities(logits, expected), atol=1e-12)
        assert torch.equal(largest, logits.amax(dim=-1))


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_candidates_that_do_not_suffice_are_fetched(monkeypatch, top_p):
    """With 4 candidates a rank, a flat-ish row needs all of them."""
    monkeypatch.setattr(vocabulary, "CANDIDATES", 4)
    logits = make_logits("random", 400, 6) / 10
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=n) for n in range(6)]
    expected = sampling.choose(logits, params, range(6))
    uniforms = torch.tensor([uniform(p.seed, row) for row, p in enumerate(params)], dtype=torch.float64)

    def own(place):
        at, part = shards(place, logits)
        return at.draw(part, torch.ones(6).double(), torch.zeros(6).long(), torch.full((6,), top_p).double(), uniforms)

    assert all(torch.equal(found, expected) for found in simulate(4, own))


def test_frequencies():
    """100,000 even uniform numbers give each token its probability, over shard borders too."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.5, -torch.inf, 0.7]])
    count = 100_000
    uniforms = (torch.arange(count).double() + 0.5) / count

    def own(place):
        at, part = shards(place, logits.expand(count, 7))
        ones = torch.ones(count, dtype=torch.float64)
        return at.draw(part, ones, torch.zeros(count, dtype=torch.int64), ones, uniforms)

    found = torch.bincount(simulate(3, own)[0], minlength=7) / count
    assert torch.allclose(found.double(), torch.softmax(logits[0].double(), -1), atol=2e-5)


def test_likeliest():
    logits = make_logits("ties", 53, 4)

    def own(place):
        at, part = shards(place, logits)
        return at.top(part, 20)

    values, ids = simulate(4, own)[0]
    order = logits.double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :20]) and torch.equal(ids, order.indices[:, :20])


def test_nan_is_seen_on_every_rank():
    logits = make_logits("random", 40, 2)
    logits[1, 3] = torch.nan

    def own(place):
        at, part = shards(place, logits)
        return at.largest(part)

    for found in simulate(4, own):
        assert torch.isfinite(found[0]) and torch.isnan(found[1])
