"""From seconds to dollars: what a million tokens cost, and when that is less than somebody's price for them.

A replica costs its GPUs times the price of a GPU-hour, busy or idle. So dollars per million tokens are the hourly
cost over the tokens of an hour; `utilisation`, the busy share of the hour, divides them. Everything is linear in the
price of a GPU-hour. With prefill and decode disaggregated, the two kinds of token are produced by separate pools and
priced apart; a request then costs the sum over its input and output tokens.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.cost.errors import CostError, check_count, check_fraction, check_positive

USD_PER_GPU_HOUR = 3.00


def usd_per_million_tokens(
    seconds: float, tokens: float, gpus: int = 1, usd_per_gpu_hour: float = USD_PER_GPU_HOUR, utilisation: float = 1.0
) -> float:
    """Dollars per million tokens of a replica of `gpus` GPUs that makes `tokens` tokens in `seconds` when busy.

    utilisation: busy share of the paid time, in (0, 1].
    """
    check_positive("seconds", seconds)
    check_positive("tokens", tokens)
    check_count("gpus", gpus, least=1)
    if not usd_per_gpu_hour >= 0:
        raise CostError(f"usd_per_gpu_hour is {usd_per_gpu_hour!r}; a number of at least 0 is expected")
    check_fraction("utilisation", utilisation, above_zero=True)
    return gpus * usd_per_gpu_hour / 3600 * seconds / tokens * 1e6 / utilisation


@dataclass(frozen=True)
class OperatingPoint:
    """A replica at work: one point of a chart of speed against price."""

    batch: int
    gpus: int
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float
    tokens_per_second_per_gpu: float
    usd_per_million_tokens: float


def decode_point(
    step_seconds: float, batch: int, gpus: int = 1, usd_per_gpu_hour: float = USD_PER_GPU_HOUR,
    utilisation: float = 1.0, tokens_per_step: float = 1.0,
) -> OperatingPoint:
    """Speed and price of output tokens when each of `batch` sequences gets `tokens_per_step` tokens every
    `step_seconds` (more than one with speculation). Speed is that of a busy replica; the price includes idle time."""
    check_count("batch", batch, least=1)
    per_user = check_positive("tokens_per_step", tokens_per_step) / check_positive("step_seconds", step_seconds)
    price = usd_per_million_tokens(step_seconds, batch * tokens_per_step, gpus, usd_per_gpu_hour, utilisation)
    return OperatingPoint(batch, gpus, step_seconds, batch * per_user, per_user, batch * per_user / gpus, price)


def prefill_point(
    seconds: float, tokens: int, batch: int = 1, gpus: int = 1, usd_per_gpu_hour: float = USD_PER_GPU_HOUR,
    utilisation: float = 1.0,
) -> OperatingPoint:
    """Speed and price of input tokens when `batch` prompts of `tokens` tokens are prefilled together in `seconds`."""
    check_count("batch", batch, least=1)
    check_count("tokens", tokens, least=1)
    per_user = tokens / check_positive("seconds", seconds)
    price = usd_per_million_tokens(seconds, batch * tokens, gpus, usd_per_gpu_hour, utilisation)
    return OperatingPoint(batch, gpus, seconds, batch * per_user, per_user, batch * per_user / gpus, price)


@dataclass(frozen=True)
class TokenPrice:
    """Dollars per million input tokens and per million output tokens: a cost of ours, or an API's price."""

    usd_per_million_input: float
    usd_per_million_output: float

    def __post_init__(self) -> None:
        for name in ("usd_per_million_input", "usd_per_million_output"):
            if not getattr(self, name) >= 0:
                raise CostError(f"{name} is {getattr(self, name)!r}; a number of at least 0 is expected")

    def request_usd(self, input_tokens: float, output_tokens: float) -> float:
        """Dollars for one request of that many tokens."""
        return (input_tokens * self.usd_per_million_input + output_tokens * self.usd_per_million_output) / 1e6

    def blended_usd_per_million(self, input_share: float) -> float:
        """Dollars per million tokens of a traffic whose tokens are inputs to the part `input_share`, in [0, 1]."""
        check_fraction("input_share", input_share)
        return input_share * self.usd_per_million_input + (1 - input_share) * self.usd_per_million_output


def break_even_utilisation(busy_cost: TokenPrice, api: TokenPrice, input_share: float) -> float:
    """Utilisation at which serving costs what the API charges for the same mix; above 1 it never pays.

    busy_cost: the cost at utilisation 1. input_share: part of the tokens that are inputs.
    """
    income = api.blended_usd_per_million(input_share)
    return busy_cost.blended_usd_per_million(input_share) / check_positive("the API's blended price", income)


def break_even_usd_per_gpu_hour(
    cost: TokenPrice, api: TokenPrice, input_share: float, usd_per_gpu_hour: float = USD_PER_GPU_HOUR
) -> float:
    """Price of a GPU-hour at which serving costs what the API charges; `cost` was computed at `usd_per_gpu_hour`."""
    spent = check_positive("the blended cost", cost.blended_usd_per_million(input_share))
    return check_positive("usd_per_gpu_hour", usd_per_gpu_hour) * api.blended_usd_per_million(input_share) / spent
