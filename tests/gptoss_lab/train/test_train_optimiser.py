"""Muon and AdamW: the orthogonal step, descent, and going on from a saved state."""
import pytest
import torch
from torch import nn

from gptoss_lab.train.optimiser import CAP, Optimiser, cap_heads, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (3, 16, 40)])
def test_singular_values_come_near_one(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    found = orthogonal(x)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3 and values.max() < 1.3
    # The direction is that of the exact factor.
    exact = u @ vh
    assert (found * exact).sum() / found.norm() / exact.norm() > 0.95


def problem(muon):
    torch.manual_seed(0)
    parameters = {"layers.0.qkv": nn.Parameter(torch.randn(8, 6)), "layers.0.out": nn.Parameter(torch.randn(2, 6, 8)),
                  "norm": nn.Parameter(torch.randn(6))}
    return parameters, Optimiser(parameters.items(), muon=muon, adamw=0.02)


def loss_of(parameters):
    return sum((p - i).square().sum() for i, p in enumerate(parameters.values()))


def step(parameters, optimiser, count):
    for _ in range(count):
        loss_of(parameters).backward()
        optimiser.step(1.0)
        assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize("muon", [0.0, 0.02])
def test_it_descends_and_goes_on_where_it_stood(muon):
    parameters, optimiser = problem(muon)
    assert set(optimiser.matrices) == (set() if muon == 0 else {"layers.0.qkv", "layers.0.out"})
    before = loss_of(parameters).item()
    step(parameters, optimiser, 20)
    saved = {n: p.detach().clone() for n, p in parameters.items()}
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, optimiser.state_dict())
    step(parameters, optimiser, 20)
    assert loss_of(parameters).item() < 0.8 * before
    again, other = problem(muon)
    with torch.no_grad():
        for name, p in again.items():
            p.copy_(saved[name])
    other.load_state_dict(state)
    step(again, other, 20)
    assert all(torch.equal(p, parameters[n]) for n, p in again.items())


def test_the_factor_scales_the_step():
    moves = []
    for factor in (1.0, 0.5, 0.0):
        parameters, optimiser = problem(0.02)
        before = {n: p.detach().clone() for n, p in parameters.items()}
        loss_of(parameters).backward()
        optimiser.step(factor)
        moves.append({n: (p.detach() - before[n]).norm().item() for n, p in parameters.items()})
    for name in moves[0]:
        assert moves[1][name] == pytest.approx(moves[0][name] / 2, rel=1e-3) and moves[2][name] == 0


def test_only_heads_beyond_the_cap_are_scaled_back():
    small, large = torch.randn(4, 10) * 0.1, torch.randn(4, 10) * 7
    weight = torch.cat([small, large])
    cap_heads(weight, 4)
    assert torch.equal(weight[:4], small)
    assert float(weight[4:].square().mean()) == pytest.approx(CAP**2 / 10, rel=1e-5)
    ratio = weight[4:] / large
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-5)


@pytest.mark.parametrize("head_dim", [4, None])
def test_attention_weights_cannot_grow_for_ever(head_dim):
    torch.manual_seed(0)
    push = torch.randn(8, 6)
    weight = nn.Parameter(torch.randn(8, 6) / 6**0.5)
    optimiser = Optimiser([("layers.0.qkv", weight), ("norm", nn.Parameter(torch.ones(1)))], muon=0.1, adamw=0.1,
                          head_dim=head_dim)
    for _ in range(60):
        (weight * push).sum().backward()
        optimiser.step(1.0)
    sizes = weight.detach().unflatten(0, (2, 4)).square().mean(dim=(1, 2)).sqrt() * 6**0.5
    assert bool((sizes <= CAP * 1.001).all()) == (head_dim is not None)


def test_weight_decay_is_the_matrices_alone():
    matrix, norm = nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))
    optimiser = Optimiser([("layers.0.out", matrix), ("norm", norm)], muon=0.5, adamw=0.5, weight_decay=0.1)
    matrix.grad, norm.grad = torch.zeros(3, 3), torch.zeros(3)
    optimiser.step(1.0)
    assert torch.allclose(matrix, 0.95 * torch.eye(3)) and torch.equal(norm, torch.ones(3))
