"""Muon and AdamW: the orthogonal step, descent, and going on from a saved state."""
import pytest
import torch
from torch import nn

from gptoss_lab.train.optimiser import Optimiser, orthogonal


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
