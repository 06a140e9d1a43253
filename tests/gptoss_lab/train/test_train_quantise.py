"""Fake quantisation is the file's encoder, bit by bit, and passes gradients through."""
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.train.quantise import mxfp4_value, stored_value, straight_through


def same(values):
    right = mxfp4.decode(*mxfp4.encode(values))
    mine = mxfp4_value(values)
    assert torch.equal(mine, right)
    return mine


@given(st.integers(0, 10_000), st.floats(-30, 10))
@settings(max_examples=60, deadline=None)
def test_random_weights_of_any_size(seed, exponent):
    same(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent)


def test_ties_codes_zeros_and_extremes():
    halves = torch.arange(-24, 25).float() / 4                              # every code and every tie between codes
    for largest in (6.0, 4.0, 4.5, 4.6, 3.0):
        row = torch.cat([halves[halves.abs() <= largest], torch.tensor([largest])])
        padded = torch.nn.functional.pad(row, (0, -len(row) % 32)).view(-1, 32).clone()
        padded[:, 0] = largest
        same(padded)
        same(padded * 2.0**-100)
    same(torch.zeros(2, 32))


def test_once_is_enough():
    once = mxfp4_value(torch.randn(8, 96))
    assert torch.equal(mxfp4_value(once), once)


def test_the_name_decides():
    w = torch.randn(2, 32)
    assert torch.equal(stored_value("layers.0.gate_up", w), mxfp4_value(w))
    assert torch.equal(stored_value("layers.0.gate_up_bias", w), w.bfloat16().float())
    assert torch.equal(stored_value("unembedding", w), w.bfloat16().float())


def test_the_gradient_passes_through():
    w = torch.randn(2, 32, requires_grad=True)
    out = straight_through("layers.0.down", w)
    assert torch.allclose(out, mxfp4_value(w.detach()), atol=1e-6)
    weight = torch.randn(2, 32)
    (out * weight).sum().backward()
    assert torch.equal(w.grad, weight)
