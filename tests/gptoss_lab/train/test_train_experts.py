"""The expert layer with gradients against the reference operation."""
import pytest
import torch

from gptoss_kernels.reference.experts import ExpertMatrices, moe
from gptoss_kernels.reference.moe import swiglu
from gptoss_lab.train import experts
from gptoss_lab.train.experts import balance_loss, choose_product, expert_layer

E, H, MIDDLE, K, T = 5, 16, 24, 2, 37


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = ((T, H), (E, 2 * MIDDLE, H), (E, 2 * MIDDLE), (E, H, MIDDLE), (E, H))
    x, w1, b1, w2, b2 = (torch.randn(*s, generator=g, dtype=dtype, requires_grad=True) for s in shapes)
    ids = torch.stack([torch.randperm(E - 1, generator=g)[:K] for _ in range(T)])           # the last expert is unused
    weights = torch.rand(T, K, generator=g, dtype=dtype).requires_grad_()
    return x, ids, weights, w1, b1, w2, b2


def test_values_and_gradients_are_the_references():
    x, ids, weights, w1, b1, w2, b2 = inputs()
    leaves = (x, weights, w1, b1, w2, b2)
    mine = expert_layer(x, ids, weights, w1, b1, w2, b2, alpha=1.702, limit=7.0, swiglu=swiglu)
    right = moe(x, ids, weights, ExpertMatrices("dense", w1), b1, ExpertMatrices("dense", w2), b2)
    assert torch.allclose(mine, right, atol=1e-12, rtol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (mine, right)), strict=True):
        assert torch.allclose(a, b, atol=1e-12 * float(b.abs().max()), rtol=0)


def test_the_grouped_kernel_is_the_loop():
    rows = torch.randn(50, 32, dtype=torch.bfloat16)
    matrices, ends = torch.randn(4, 24, 32, dtype=torch.bfloat16), torch.tensor([10, 10, 33, 50], dtype=torch.int32)
    found = []
    for product in (experts._loop, experts._kernel):
        leaves = [t.clone().requires_grad_() for t in (rows, matrices)]
        out = product(*leaves, ends)
        found.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.01)


def test_balance_is_one_when_even_and_e_when_all_go_to_one():
    even = torch.tensor([[0], [1], [2], [3]])
    assert balance_loss(torch.zeros(4, 4), even) == pytest.approx(1.0)
    one = torch.full((4, 4), -50.0)
    one[:, 2] = 50.0
    assert balance_loss(one, torch.full((4, 1), 2)) == pytest.approx(4.0)


def test_its_gradient_takes_from_the_busy_expert():
    logits = torch.zeros(6, 3, requires_grad=True)
    balance_loss(logits, torch.tensor([[0], [0], [0], [0], [1], [2]])).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_the_choice_of_a_product_says_why():
    assert choose_product(torch.device("cpu")) == (True, "loop: the device is no GPU")
