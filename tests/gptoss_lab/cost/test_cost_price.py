"""Dollars: by hand, linear in the rate, and where they break even."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_lab.cost import CostError, TokenPrice, decode_point, prefill_point, usd_per_million_tokens
from gptoss_lab.cost.price import break_even_usd_per_gpu_hour, break_even_utilisation

positive = st.floats(1e-6, 1e6)


def test_a_million_tokens_an_hour_cost_the_hour():
    assert usd_per_million_tokens(seconds=3600, tokens=1e6) == pytest.approx(3.00)
    assert usd_per_million_tokens(seconds=3600, tokens=1e6, gpus=8, usd_per_gpu_hour=2.5) == pytest.approx(20.0)
    assert usd_per_million_tokens(seconds=3600, tokens=1e6, utilisation=0.25) == pytest.approx(12.0)


@given(seconds=positive, tokens=positive, gpus=st.integers(1, 64), rate=st.floats(0.01, 100), factor=st.floats(0, 50),
       busy=st.floats(0.01, 1))
def test_price_is_linear_in_the_rate_and_the_gpus(seconds, tokens, gpus, rate, factor, busy):
    price = usd_per_million_tokens(seconds, tokens, gpus, rate, busy)
    assert usd_per_million_tokens(seconds, tokens, gpus, factor * rate, busy) == pytest.approx(factor * price)
    assert usd_per_million_tokens(seconds, tokens, 2 * gpus, rate, busy) == pytest.approx(2 * price)
    assert usd_per_million_tokens(seconds, tokens, gpus, rate, 1.0) == pytest.approx(busy * price)


def test_operating_points_by_hand():
    point = decode_point(step_seconds=0.01, batch=32, gpus=4)
    assert (point.tokens_per_second, point.tokens_per_second_per_user) == pytest.approx((3200, 100))
    assert point.tokens_per_second_per_gpu == pytest.approx(800)
    assert point.usd_per_million_tokens == pytest.approx(12 / (3200 * 3600) * 1e6)
    twice = decode_point(step_seconds=0.01, batch=32, gpus=4, tokens_per_step=2)
    assert twice.usd_per_million_tokens == pytest.approx(point.usd_per_million_tokens / 2)
    assert twice.tokens_per_second_per_user == pytest.approx(200)
    prompt = prefill_point(seconds=0.364, tokens=8192)
    assert round(prompt.usd_per_million_tokens, 3) == 0.037
    two = prefill_point(0.364, 8192, batch=2)
    assert two.usd_per_million_tokens == pytest.approx(prompt.usd_per_million_tokens / 2)


def test_requests_and_blends():
    price = TokenPrice(0.04, 0.20)
    assert price.request_usd(8000, 500) == pytest.approx(8000 * 0.04e-6 + 500 * 0.20e-6)
    assert [price.blended_usd_per_million(share) for share in (0, 0.75, 1)] == pytest.approx([0.20, 0.08, 0.04])


@given(cost_in=st.floats(0.001, 10), cost_out=st.floats(0.001, 10), api_in=st.floats(0.001, 10),
       api_out=st.floats(0.001, 10), share=st.floats(0, 1), rate=st.floats(0.1, 20))
def test_break_even_is_where_cost_meets_income(cost_in, cost_out, api_in, api_out, share, rate):
    cost, api = TokenPrice(cost_in, cost_out), TokenPrice(api_in, api_out)
    income = api.blended_usd_per_million(share)
    busy = break_even_utilisation(cost, api, share)
    assert cost.blended_usd_per_million(share) / busy == pytest.approx(income)
    hour = break_even_usd_per_gpu_hour(cost, api, share, rate)
    assert cost.blended_usd_per_million(share) * hour / rate == pytest.approx(income)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: usd_per_million_tokens(0, 1), "seconds is 0"),
        (lambda: usd_per_million_tokens(1, 0), "tokens is 0"),
        (lambda: usd_per_million_tokens(float("nan"), 1), "seconds is nan"),
        (lambda: usd_per_million_tokens(1, 1, gpus=0), "gpus is 0"),
        (lambda: usd_per_million_tokens(1, 1, usd_per_gpu_hour=-1), "usd_per_gpu_hour is -1"),
        (lambda: usd_per_million_tokens(1, 1, usd_per_gpu_hour=float("nan")), "usd_per_gpu_hour is nan"),
        (lambda: usd_per_million_tokens(1, 1, utilisation=0), r"utilisation is 0; a number in \(0, 1\]"),
        (lambda: usd_per_million_tokens(1, 1, utilisation=1.1), "utilisation is 1.1"),
        (lambda: decode_point(0.01, 0), "batch is 0"),
        (lambda: decode_point(0, 1), "step_seconds is 0"),
        (lambda: prefill_point(0.1, 0), "tokens is 0"),
        (lambda: TokenPrice(-1, 1), "usd_per_million_input is -1"),
        (lambda: TokenPrice(1, 1).blended_usd_per_million(2), "input_share is 2"),
        (lambda: break_even_utilisation(TokenPrice(1, 1), TokenPrice(0, 0), 0.5), "blended price is 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(CostError, match=message):
        call()
