"""Speculation: the expected run by simulation, break-even by its definition, why the 20B hardly helps the 120B."""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.cost import CostError, decode_bound
from gptoss_lab.cost.precision import RELEASED, SERVED
from gptoss_lab.cost.speculation import (
    StepSeconds,
    best_draft_tokens,
    bound_steps,
    break_even_acceptance,
    draft_bytes_that_pay,
    draft_seconds_that_pay,
    measured_step_seconds,
    speedup,
    tokens_per_round,
)

seconds = st.floats(1e-4, 1e-1)


@pytest.mark.parametrize(("acceptance", "draft_tokens"), [(0.3, 1), (0.7, 4), (0.9, 8)])
def test_tokens_per_round_is_what_a_simulation_yields(acceptance, draft_tokens):
    rng, rounds, tokens = random.Random(0), 200_000, 0
    for _ in range(rounds):
        accepted = 0
        while accepted < draft_tokens and rng.random() < acceptance:
            accepted += 1
        tokens += accepted + 1
    assert tokens_per_round(acceptance, draft_tokens) == pytest.approx(tokens / rounds, rel=0.01)


def test_tokens_per_round_at_its_ends():
    assert tokens_per_round(0, 5) == 1 and tokens_per_round(1, 5) == 6 and tokens_per_round(0.5, 0) == 1
    assert tokens_per_round(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_speedup_by_hand():
    steps = StepSeconds(target=10e-3, draft=1e-3, verify=11e-3)
    assert speedup(0.5, 2, steps) == pytest.approx(1.75 * 10 / 13)
    assert speedup(0.0, 2, steps) == pytest.approx(10 / 13)
    assert speedup(0.7, 0, StepSeconds(10e-3, 1e-3, 10e-3)) == 1


@settings(max_examples=100)
@given(target=seconds, draft=seconds, verify=seconds, k=st.integers(1, 12), wanted=st.floats(0.2, 4))
def test_break_even_acceptance_is_the_first_that_reaches_the_speedup(target, draft, verify, k, wanted):
    steps = StepSeconds(target, draft, verify)
    least = break_even_acceptance(k, steps, wanted)
    if least is None:
        assert speedup(1.0, k, steps) < wanted
    else:
        assert speedup(least, k, steps) >= wanted
        assert least == 0 or speedup(max(0.0, least - 1e-6), k, steps) < wanted


@settings(max_examples=100)
@given(target=seconds, verify=seconds, acceptance=st.floats(0, 1), k=st.integers(1, 12), wanted=st.floats(0.2, 4))
def test_a_draft_as_fast_as_allowed_reaches_the_speedup_exactly(target, verify, acceptance, k, wanted):
    longest = draft_seconds_that_pay(acceptance, k, target, verify, wanted)
    if longest > 1e-9:
        assert speedup(acceptance, k, StepSeconds(target, longest, verify)) == pytest.approx(wanted)
    else:
        assert speedup(acceptance, k, StepSeconds(target, 1e-9, verify)) <= wanted * (1 + 1e-6)
    size = draft_bytes_that_pay(acceptance, k, target, verify, wanted)
    assert size == pytest.approx(longest * 4.8e12)


@given(target=seconds, draft=seconds, verify=seconds, k=st.integers(1, 12), a=st.floats(0, 0.99))
def test_speedup_grows_with_acceptance(target, draft, verify, k, a):
    steps = StepSeconds(target, draft, verify)
    assert speedup(a + 0.01, k, steps) > speedup(a, k, steps)


def test_steps_at_their_bounds(b20, b120):
    steps = bound_steps(b120, b20, 8192, 4)
    assert steps.target == decode_bound(b120, 8192, precision=SERVED).sequential_seconds
    assert steps.draft == decode_bound(b20, 8192, precision=SERVED).sequential_seconds
    assert steps.verify > 3 * steps.target              # five tokens pick 19 of 128 experts, one token 4
    assert bound_steps(b120, b20, 8192, 0).verify == steps.target


@pytest.mark.parametrize("precision", [SERVED, RELEASED], ids=["fp8", "mxfp4"])
def test_20b_drafting_for_120b_is_marginal_at_batch_1(b20, b120, precision):
    """A draft step takes over 70 % of a target step. With uniform routing the verification's experts then cost more
    than the accepted tokens bring, at any acceptance; were the verification free, 0.8 would still gain under 10 %."""
    for k in range(1, 9):
        steps = bound_steps(b120, b20, 8192, k, precision=precision)
        assert steps.draft > 0.7 * steps.target
        assert break_even_acceptance(k, steps) is None
        assert speedup(0.8, k, steps.with_shared_experts()) < 1.1
    assert best_draft_tokens(1.0, b120, b20, 8192, 8, precision=precision)[1] < 1


def test_a_larger_batch_makes_verification_cheap_and_speculation_pay(b20, b120):
    gains = [best_draft_tokens(0.8, b120, b20, 8192, 8, batch)[1] for batch in (1, 32, 128)]
    assert gains[0] < 1 < gains[1] < gains[2]


def test_measured_steps_come_from_exactly_one_row():
    def row(value, **conditions):
        return {"suite": "decode", "metric": "ms_per_step", "backend": "ours", "value": value,
                "conditions": {"model": "gpt-oss-20b", "batch": 1, "tokens": 8192, **conditions}}

    rows = [row(2.5), row(1.5, tp=2), row(None, tp=4), {**row(9.0, tp=1), "suite": "prefill"}]
    assert measured_step_seconds(rows, "gpt-oss-20b", 1, 8192, tp=2) == pytest.approx(1.5e-3)
    assert measured_step_seconds(rows, "gpt-oss-20b", 1, 8192) == pytest.approx(2.5e-3), "of one GPU, if none is named"
    with pytest.raises(CostError, match="2 measured rows"):
        measured_step_seconds([*rows, row(2.6, tp=1)], "gpt-oss-20b", 1, 8192)
    for unmatched in ({"tp": 4}, {"backend": "theirs"}):
        with pytest.raises(CostError, match="0 measured rows"):
            measured_step_seconds(rows, "gpt-oss-20b", 1, 8192, **unmatched)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokens_per_round(1.1, 2), r"acceptance is 1.1; a number in \[0, 1\]"),
        (lambda: tokens_per_round(0.5, -1), "draft_tokens is -1"),
        (lambda: StepSeconds(1, 0, 1), "draft step seconds is 0"),
        (lambda: break_even_acceptance(0, StepSeconds(1, 1, 1)), "draft_tokens is 0"),
        (lambda: draft_seconds_that_pay(0.5, 2, 1, 1, 0), "wanted_speedup is 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(CostError, match=message):
        call()
