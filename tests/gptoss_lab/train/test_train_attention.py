"""Attention with gradients: the sink on top of sink-less kernels, flex, and the self-check that chooses."""
import math

import pytest
import torch

from gptoss_kernels.reference.attention import sink_attention
from gptoss_lab.train import attention
from gptoss_lab.train.attention import FlashKernels, WithSink, choose_form, disagreement, packed

OFFSETS = (0, 3, 40, 75)


class DenseKernels(FlashKernels):
    """What the flash kernels promise, densely: out and log-sum-exp without sinks; a backward that believes its `lse`
    and `out`. So the identity that `WithSink` rests on is tested where no GPU is."""

    def _scores(self, q, k, window):
        at = torch.arange(len(q))
        dialogue = torch.bucketize(at, self.starts[1:].long(), right=True)
        seen = (dialogue[:, None] == dialogue) & (at[:, None] >= at)
        seen &= True if window is None else at[:, None] - at < window
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        z = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[2])
        return z.masked_fill(~seen, -torch.inf)

    def forward(self, q, k, v, window):
        z = self._scores(q, k, window)
        wide = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return torch.einsum("hqk,khd->qhd", z.softmax(-1), wide), z.logsumexp(-1), ()

    def backward(self, grad, q, k, v, out, lse, state, window):
        ratio, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[2])
        p = torch.exp(self._scores(q, k, window) - lse[..., None])
        keys, values = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
        dp = torch.einsum("qhd,khd->hqk", grad, values)
        dz = p * (dp - (grad * out).sum(-1).t()[..., None]) * scale
        dk, dv = torch.einsum("hqk,qhd->khd", dz, q), torch.einsum("hqk,qhd->khd", p, grad)
        return torch.einsum("hqk,khd->qhd", dz, keys), *(x.unflatten(1, (-1, ratio)).sum(2) for x in (dk, dv))


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((75, 6, 16), (75, 2, 16), (75, 2, 16), (6,))
    return [torch.randn(*s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def with_gradients(function, leaves):
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return out, *torch.autograd.grad((out * weight).sum(), leaves)


@pytest.mark.parametrize("window", [None, 8])
def test_a_sink_on_kernels_without_one_is_exact(window):
    leaves = inputs()
    right = with_gradients(lambda *x: sink_attention(
        *x, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, window=window)[0], leaves)
    kernels = DenseKernels(torch.tensor(OFFSETS), 37)
    mine = with_gradients(lambda *x: WithSink.apply(*x, kernels, window), leaves)
    for a, b in zip(right, mine, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 8])
def test_flex_values_are_exact(window):
    """Its gradients exist on a GPU only, where the self-check compares them."""
    q, k, v, sinks = (x.detach().float() for x in inputs())
    a, b = (packed(form, OFFSETS, torch.device("cpu"))(0, q, k, v, sinks, window) for form in ("reference", "flex"))
    assert torch.allclose(a, b, atol=2e-6, rtol=0)


def test_a_window_keeps_as_many_keys_as_it_says():
    assert attention._window(128) == {"window_size_left": 127, "window_size_right": 0} and attention._window(None) == {}


def test_the_self_check_finds_a_wrong_form(monkeypatch):
    right = attention._reference
    cpu = torch.device("cpu")

    def off_by_one(offsets, layer, q, k, v, sinks, window):
        return right(offsets, layer, q, k, v, sinks, window and window - 1)

    def without_sink_gradient(offsets, layer, q, k, v, sinks, window):
        return right(offsets, layer, q, k, v, sinks.detach() + 0 * sinks, window)

    for wrong, what in ((off_by_one, "with window 128"), (without_sink_gradient, "dsinks is off")):
        monkeypatch.setattr(attention, "packed", lambda form, offsets, device, wrong=wrong: (
            lambda *x: (right if form == "reference" else wrong)(offsets, *x)))
        assert what in disagreement("other", cpu, torch.float32)
    monkeypatch.setattr(attention, "packed", lambda form, offsets, device: lambda *x: right(offsets, *x))
    assert disagreement("other", cpu, torch.float32) is None


def test_choice_without_a_gpu_says_why():
    assert choose_form(torch.device("cpu"), torch.float32) == (
        "reference", "the device is cpu; flash and flex need a GPU")
    assert choose_form(torch.device("cpu"), torch.float32, "flex") == ("flex", "asked for")
    assert disagreement("flash", torch.device("cpu"), torch.float32) is not None        # the kernels need a GPU
    with pytest.raises(ValueError, match="form is 'fast'"):
        packed("fast", OFFSETS, torch.device("cpu"))
