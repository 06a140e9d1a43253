"""Closed forms of waiting against their textbook values and against each other."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_lab.cost import CostError
from gptoss_lab.cost.queueing import (
    load,
    mg1_mean_wait,
    mmc_mean_wait,
    mmc_wait_quantile,
    shared_mean_stay,
    wait_probability,
)


def erlang_c(servers, offered):
    """With factorials, as it is usually printed."""
    top = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return top / (sum(offered**n / math.factorial(n) for n in range(servers)) + top)


@given(st.integers(1, 30), st.floats(0.01, 0.99))
def test_erlang_c_is_what_the_formula_with_factorials_gives(servers, rho):
    assert wait_probability(rho * servers, 1.0, servers) == pytest.approx(erlang_c(servers, rho * servers), rel=1e-9)


def test_known_values():
    assert wait_probability(0.5, 1.0) == 0.5
    assert mmc_mean_wait(8, 0.1) == pytest.approx(0.4)                  # M/M/1: rho s / (1 - rho)
    assert mmc_mean_wait(16, 0.1, 2) == pytest.approx(0.16 / 0.9)       # M/M/2: rho^2 s / (1 - rho^2)
    assert mg1_mean_wait(8, 0.1) == pytest.approx(0.2)                  # M/D/1 is half of M/M/1
    assert mg1_mean_wait(8, 0.1, variation=1) == pytest.approx(mmc_mean_wait(8, 0.1))
    assert shared_mean_stay(8, 0.1) == pytest.approx(0.1 + mmc_mean_wait(8, 0.1))


@given(st.integers(1, 12), st.floats(0.05, 0.95))
def test_quantiles_are_those_of_an_exponential_tail(servers, rho):
    """P(wait > t) = C exp(-(1 - rho) c t / s): its integral is the mean, and the quantile inverts it."""
    waiting, rate = wait_probability(rho * servers, 1.0, servers), servers * (1 - rho)
    assert mmc_mean_wait(rho * servers, 1.0, servers) == pytest.approx(waiting / rate)
    for quantile in (0.5, 0.95, 0.99):
        t = mmc_wait_quantile(rho * servers, 1.0, servers, quantile)
        assert (t == 0) if waiting <= 1 - quantile else waiting * math.exp(-rate * t) == pytest.approx(1 - quantile)


@given(st.integers(1, 10), st.floats(0.1, 0.95))
def test_one_queue_for_all_beats_a_queue_for_each(servers, rho):
    assert mmc_mean_wait(rho * servers, 1.0, servers) <= mmc_mean_wait(rho, 1.0) * (1 + 1e-12)


@pytest.mark.parametrize("call", [
    lambda: load(10, 0.1), lambda: mmc_mean_wait(20, 0.1, 2), lambda: mg1_mean_wait(11, 0.1),
    lambda: shared_mean_stay(10, 0.1),
])
def test_a_queue_that_grows_for_ever_is_an_error(call):
    with pytest.raises(CostError, match="the queue grows for ever"):
        call()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: load(0, 1), "arrivals_per_second is 0"), (lambda: load(1, -1), "service_seconds is -1"),
    (lambda: load(1, 0.1, 0), "servers is 0"), (lambda: mg1_mean_wait(1, 0.1, -1), "variation is -1"),
    (lambda: mmc_wait_quantile(1, 0.1, 1, 1.0), "quantile is 1.0"),
])
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(CostError, match=message):
        call()
