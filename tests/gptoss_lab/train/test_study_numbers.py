"""Intervals and the paired test against closed forms."""
import math

import pytest
import torch

from gptoss_lab.train.study.numbers import Z, mcnemar, mean_per_token, paired_difference


@pytest.mark.parametrize(("gained", "lost", "p"), [
    (0, 0, 1.0), (0, 5, 2 / 32), (5, 0, 2 / 32), (1, 9, 2 * 11 / 1024), (3, 3, 1.0), (0, 10, 2 / 1024),
    (2, 6, 2 * (1 + 8 + 28) / 256),
])
def test_mcnemar_is_the_two_sided_binomial(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p, rel=1e-12)


def test_mcnemar_of_many_pairs_is_the_normal_one():
    z = (600 - 500 - 1) / math.sqrt(1100)           # with the continuity correction
    assert mcnemar(500, 600) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=2e-2)


def test_a_paired_difference_is_the_mean_of_plus_and_minus_ones():
    outcomes = torch.tensor([1.0] * 3 + [-1.0] * 9 + [0.0] * 88, dtype=torch.float64)
    found = paired_difference(3, 9, 100)
    half = Z * float(outcomes.std(correction=0)) / math.sqrt(100)
    assert found.value == pytest.approx(-0.06) and found.high - found.value == pytest.approx(half)
    assert paired_difference(0, 0, 5) == type(found)(0.0, 0.0, 0.0)


def test_dialogues_of_one_length_give_the_interval_of_a_mean():
    means = [0.1, 0.4, 0.2, 0.9, 0.3]
    found = mean_per_token([7 * m for m in means], [7] * 5)
    half = Z * float(torch.tensor(means, dtype=torch.float64).std()) / math.sqrt(5)
    assert found.value == pytest.approx(0.38) and found.high == pytest.approx(0.38 + half)
    assert found.low == pytest.approx(0.38 - half)


def test_tokens_of_a_dialogue_do_not_count_as_independent():
    few = mean_per_token([10.0, 30.0], [10, 10])
    many = mean_per_token([1_000.0, 3_000.0], [1_000, 1_000])
    assert few.high == pytest.approx(many.high)


def test_a_ratio_covers_its_truth_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        counts = torch.randint(1, 20, (60,), generator=generator)
        totals = counts * 0.5 + torch.randn(60, generator=generator, dtype=torch.float64) * counts.sqrt()
        found = mean_per_token(totals.tolist(), counts.tolist())
        inside += found.low <= 0.5 <= found.high
    assert 0.915 < inside / 400 < 0.985


def test_one_dialogue_says_nothing_of_the_spread():
    found = mean_per_token([2.0], [4])
    assert (found.value, found.low, found.high) == (0.5, -math.inf, math.inf)


@pytest.mark.parametrize("call", [
    lambda: mcnemar(-1, 2), lambda: paired_difference(3, 3, 5), lambda: paired_difference(0, 0, 0),
    lambda: mean_per_token([1.0], [1, 2]), lambda: mean_per_token([], []), lambda: mean_per_token([0.0], [0]),
])
def test_bad_numbers_are_refused(call):
    with pytest.raises(ValueError, match="problems|dialogues"):
        call()
