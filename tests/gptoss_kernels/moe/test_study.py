"""Three ways for a bias, and what precision does to routing: closed forms and orders of magnitude."""
import pytest
import torch

from gptoss_kernels.moe import study


def test_second_pass_rounds_twice_and_the_accumulator_once():
    g = torch.Generator().manual_seed(0)
    product, bias = torch.randn(400, 256, generator=g), torch.randn(256, generator=g)
    exact = product.double() + bias.double()
    once = (study.bias_in_accumulator(product, bias).double() - exact).norm() / exact.norm()
    twice = (study.bias_in_second_pass(product, bias).double() - exact).norm() / exact.norm()
    assert 1.4e-3 < once < 1.9e-3 < 1.2 * once < twice < 2 * once


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_each_extra_column_takes_the_bias_four_bits_further(columns):
    bias = torch.randn(2880, generator=torch.Generator().manual_seed(1))
    values, scale = study.bias_as_columns(bias, columns)
    assert values.shape == (2880, columns) and scale.shape == (23, columns)
    error = (study.bias_from_columns(values, scale) - bias).norm() / bias.norm()
    assert 2.0 ** (-5.5 * columns - 1) < error < 2.0 ** (-4 * columns)


def test_a_zero_bias_is_exact():
    values, scale = study.bias_as_columns(torch.zeros(130), 1)
    assert (study.bias_from_columns(values, scale) == 0).all() and (scale == 1).all()


def test_costs():
    cost = study.bias_bytes(32768, 5760, 128)
    assert cost == {"second pass": 4 * 128 * 5760 + 4 * 32768 * 5760,
                    "extra columns": 128 * (32768 + 128 * 5760) + 4 * (32768 + 128 * 45), "accumulator": 4 * 128 * 5760}
    assert study.block_waste(2880, 128) == pytest.approx(23 / 22.5 - 1)
    assert study.block_waste(5760, 128) == 0 and study.block_waste(2880, 64) == 0


def test_exact_routing_changes_nothing_and_bf16_logits_change_sets():
    logits = torch.randn(4000, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    none = study.routing_change(logits, 4, logits_dtype=torch.float64, softmax_dtype=torch.float64,
                                weight_dtype=torch.float64)
    assert none == study.RoutingChange(0.0, 0.0)
    wide = study.routing_change(logits, 4)
    weights = study.routing_change(logits, 4, weight_dtype=torch.bfloat16)
    narrow = study.routing_change(logits, 4, logits_dtype=torch.bfloat16)
    assert wide.sets_changed == weights.sets_changed < 1e-3 < narrow.sets_changed < 0.1
    assert wide.weight_error < 1e-6 and 1e-4 < weights.weight_error <= 2**-9


@pytest.mark.parametrize("call", [lambda: study.bias_as_columns(torch.zeros(4), 0), lambda: study.block_waste(0, 128)])
def test_bad_input(call):
    with pytest.raises(ValueError, match="needed|positive"):
        call()
