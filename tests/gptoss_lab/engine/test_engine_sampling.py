"""Sampling against closed forms: a second implementation in exact arithmetic, and counts that follow from it."""
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.engine import sampling
from gptoss_lab.engine.errors import LogitsError, SamplingError
from gptoss_lab.engine.sampling import SamplingParams, choose, invert, probabilities, uniform


def one_row(logits, temperature=1.0, top_k=0, top_p=1.0):
    row = torch.tensor([logits], dtype=torch.float32)
    heat, mass = (torch.tensor([value], dtype=torch.float64) for value in (temperature, top_p))
    return probabilities(row, heat, torch.tensor([top_k]), mass)[0]


def by_hand(weights, top_k, top_p):
    """Top-k, then top-p, on whole-number weights and in fractions: {token: probability}."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[:top_k] if top_k else order
    total, kept, mass = sum(weights[t] for t in order), [], Fraction(0)
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += Fraction(weights[token], total)
    return {token: Fraction(weights[token], sum(weights[t] for t in kept)) for token in kept}


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.integers(1, 997).map(lambda k: Fraction(k, 997)),  # a prime above any total: no sum of weights meets it
)
def test_distribution_equals_exact_arithmetic(weights, top_k, top_p):
    expected = by_hand(weights, top_k, top_p)
    got = one_row([math.log(w) for w in weights], top_k=top_k, top_p=float(top_p))
    assert {i for i, p in enumerate(got.tolist()) if p > 0} == set(expected)
    assert got.tolist() == pytest.approx([float(expected.get(i, 0)) for i in range(len(weights))], abs=1e-6)


def test_temperature_is_a_power_of_the_distribution():
    # weights 1, 2, 4 at temperature 1/2 are 1, 4, 16; at temperature 2 they are 1, sqrt 2, 2
    logits = [math.log(w) for w in (1, 2, 4)]
    assert one_row(logits, temperature=0.5).tolist() == pytest.approx([1 / 21, 4 / 21, 16 / 21], abs=1e-7)
    total = 3 + math.sqrt(2)
    flat = [1 / total, math.sqrt(2) / total, 2 / total]
    assert one_row(logits, temperature=2.0).tolist() == pytest.approx(flat, abs=1e-7)
    assert one_row(logits, temperature=1e-300).tolist() == [0, 0, 1]


def test_cuts_follow_temperature_not_the_other_way_round():
    # 8:4:2:1 has top-p 0.5 -> {8}; at temperature 3 it is 2:1.587:1.26:1, so the likeliest alone has 0.342
    logits = [math.log(w) for w in (8, 4, 2, 1)]
    assert (one_row(logits, top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (one_row(logits, temperature=3.0, top_p=0.5) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.3), (0, 0.9), (1500, 0.5), (1500, 1.0), (7, 0.99), (0, 0.999)])
def test_cuts_of_a_large_vocabulary(top_k, top_p, monkeypatch):
    """3000 tokens: flat enough that 1024 candidates suffice for some cuts only; many exact ties at the edges."""
    weights = torch.randint(1, 60, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = by_hand(weights, top_k, Fraction(top_p).limit_denominator(1000))
    got = one_row([math.log(w) for w in weights], top_k=top_k, top_p=top_p)
    assert set(got.nonzero()[:, 0].tolist()) == set(expected)
    monkeypatch.setattr(sampling, "_CANDIDATES", 10_000)
    assert torch.equal(got, one_row([math.log(w) for w in weights], top_k=top_k, top_p=top_p))


def test_ties_go_to_the_lower_id():
    assert one_row([1.0] * 6, top_k=2).tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert one_row([1.0] * 6, top_p=0.4).tolist() == pytest.approx([1 / 3] * 3 + [0] * 3)
    greedy = choose(torch.tensor([[0.0, 5.0, 5.0]]), [SamplingParams(temperature=0)], [1])
    assert greedy.tolist() == [1]


def test_top_p_keeps_the_likeliest_however_small():
    assert one_row([0.0, 0.0, 0.1], top_p=1e-9).tolist() == [0, 0, 1]


def test_token_ruled_out_by_minus_infinity_is_never_drawn():
    distribution = one_row([-math.inf, 0.0, -math.inf, 0.0])
    assert distribution.tolist() == [0, 0.5, 0, 0.5]
    edges = torch.tensor([0.0, 0.5 - 2**-54, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert invert(distribution.expand(4, -1), edges).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("size", [3, 50, 1000])
def test_share_of_uniforms_is_the_probability(size):
    """Uniforms on an even grid: each token is drawn as often as its probability says, to within one count."""
    weights = torch.randint(0, 30, (size,), generator=torch.Generator().manual_seed(size)).double()
    grid = (torch.arange(20_000).double() + 0.5) / 20_000
    drawn = invert((weights / weights.sum()).expand(20_000, -1), grid)
    counts = torch.bincount(drawn, minlength=size).double()
    assert (counts - 20_000 * weights / weights.sum()).abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("draw", [lambda i: uniform(i, 75), lambda i: uniform(1234, i)], ids=["seeds", "positions"])
def test_uniforms_are_uniform_and_independent(draw):
    """Chi-square of 16 bins, and of 4 x 4 bins of neighbouring draws; 15 degrees of freedom, 99.9 % quantile 37.70."""
    draws = np.array([draw(i) for i in range(8000)])
    assert draws.min() >= 0 and draws.max() < 1
    single = np.histogram(draws, bins=16, range=(0, 1))[0]
    pairs = np.histogram2d(draws[0::2], draws[1::2], bins=4, range=[(0, 1), (0, 1)])[0].ravel()
    for counts in (single, pairs):
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 37.70


def test_choose_draws_the_distribution_it_was_given():
    """Chi-square of 6000 draws with temperature, top-k and top-p: kept are 16, 9, 4, 1 of 30 (3 degrees, 16.27)."""
    logits = torch.tensor([math.log(w) for w in (2, 3, 1, 4)] + [-4.0] * 20)
    rows = 6000
    params = [SamplingParams(temperature=0.5, top_k=4, top_p=0.999, seed=seed) for seed in range(rows)]
    tokens = choose(logits.expand(rows, -1), params, [9] * rows)
    counts = torch.bincount(tokens, minlength=24).double()
    expected = rows * torch.tensor([4, 9, 1, 16]).double() / 30
    assert counts[4:].sum() == 0
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.27


def test_a_row_does_not_feel_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 301, generator=generator) * 3
    params = [
        SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(top_p=0.7, seed=2),
        SamplingParams(temperature=1.8, top_k=20, seed=3), SamplingParams(top_k=3, top_p=0.9, seed=1),
    ]
    together = choose(logits, params, [4, 5, 6, 7, 8]).tolist()
    alone = [choose(logits[i : i + 1], [params[i]], [4 + i]).item() for i in range(5)]
    backwards = choose(logits.flip(0), params[::-1], [8, 7, 6, 5, 4]).tolist()[::-1]
    assert together == alone == backwards
    assert together != choose(logits, params, [14, 15, 16, 17, 18]).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_gpu_draws_what_the_cpu_draws():
    logits = torch.randn(6, 201_088, generator=torch.Generator().manual_seed(0)) * 4
    cuts = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 40, 1.0), (1.0, 2000, 0.95), (0.0, 0, 1.0), (1.0, 0, 0.9999)]
    params = [SamplingParams(*cut, seed=seed) for seed, cut in enumerate(cuts)]
    assert choose(logits, params, range(6)).tolist() == choose(logits.cuda(), params, range(6)).tolist()


def test_float64_over_the_real_vocabulary():
    """One token of 99.9 % and 201,087 equally rare ones of 5e-9: each rare one can be drawn, in float32 hardly any."""
    logits = [math.log(999 * 201_087)] + [0.0] * 201_087
    expected = [1, 100_544, 201_066, 201_087]
    draws = torch.tensor([0.999 + 0.001 * (token - 0.5) / 201_087 for token in expected], dtype=torch.float64)
    flat = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=-1).expand(4, -1)
    assert invert(flat, draws).tolist() == expected
    assert one_row(logits).dtype == torch.float64
    assert invert(flat.float(), draws).tolist() != expected


def test_log_probabilities_are_those_of_the_model():
    logits = torch.tensor([[math.log(w) for w in (1, 2, 5)]] * 2)
    got = sampling.log_probabilities(logits, torch.tensor([2, 0]))
    assert got.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 8)], abs=1e-6)


@pytest.mark.parametrize("bad, shown", [(math.nan, "nan"), (math.inf, "inf")])
def test_logits_that_cannot_be_drawn_from(bad, shown):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(LogitsError, match=rf"^sequence 7: the largest logit for position 21 is {shown}; .* expected$"):
        sampling.check_logits(logits, [4, 7, 9], [20, 21, 22])
    logits[1] = -math.inf
    with pytest.raises(LogitsError, match="sequence 7: .* is -inf"):
        sampling.check_logits(logits, [4, 7, 9], [20, 21, 22])
    logits[1, 0] = 0.0
    sampling.check_logits(logits, [4, 7, 9], [20, 21, 22])


@pytest.mark.parametrize(("key", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", True),
    ("top_k", -1), ("top_k", 2.5), ("top_k", math.nan),
    ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.0001), ("top_p", math.nan), ("top_p", None),
    ("seed", -1), ("seed", 2**64), ("seed", 0.5),
    ("max_new_tokens", 0), ("max_new_tokens", -3), ("max_new_tokens", 1.5),
    ("stop_ids", 200002), ("stop_ids", ("a",)), ("stop_ids", "200002"),
])
def test_values_out_of_range(key, value):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{key: value})
    message = str(caught.value)
    assert message.startswith(f"sampling {key} is {value!r}; ") and "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_limits_are_allowed():
    SamplingParams(temperature=0, top_k=0, top_p=1, seed=2**64 - 1, max_new_tokens=1, stop_ids=())
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=1e-12)
    assert 0 <= uniform(2**64 - 1, 131_072) < 1
    fresh = {SamplingParams().seeded().seed for _ in range(20)}
    assert len(fresh) == 20 and SamplingParams(seed=5).seeded().seed == 5
