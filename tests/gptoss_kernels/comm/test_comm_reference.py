"""The reference of the fused all-reduce against its definition in fp64, and what is refused without a GPU."""
import pytest
import torch

from gptoss_kernels.comm import all_reduce_norm

symmetric = pytest.importorskip("gptoss_kernels.comm.symmetric")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_definition(world):
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 96, generator=g, dtype=torch.float64) for _ in range(world)]
    residual, weight = torch.randn(5, 96, generator=g, dtype=torch.float64), torch.rand(96, generator=g).double()
    summed, normed = all_reduce_norm(parts, residual, weight, 1e-5)
    exact = torch.stack([*parts, residual]).sum(dim=0)
    assert torch.allclose(summed, exact, atol=1e-12)
    assert torch.allclose(normed, exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight, atol=1e-12)


def test_rounded_once():
    """1 + 2^-9 + 2^-9 in bf16: rounded after each sum it stays 1, rounded once it is 1 + 2^-7 or the tie to even."""
    parts = [torch.full((1, 8), 2.0**-8).bfloat16()] * 2
    summed, _ = all_reduce_norm(parts, torch.ones(1, 8).bfloat16(), torch.ones(8))
    assert summed.unique().tolist() == [1 + 2.0**-7]


def test_form_by_rows_and_ranks():
    assert [symmetric.choose_form(rows, 4) for rows in (1, 8, 9, 128, 8192)] == ["one_shot"] * 2 + ["two_shot"] * 3
    assert {symmetric.choose_form(rows, 2) for rows in (1, 8, 9, 128, 8192)} == {"one_shot"}
    assert [symmetric.rows_of_a_program(rows, 2) for rows in (1, 128, 511, 512, 8192)] == [1, 1, 1, 2, 2]
    assert symmetric.rows_of_a_program(8192, 8) == 1, "eight rows in flight are enough"


def test_unknown_form():
    x, a = torch.zeros(1, 64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="form is 'three_shot'"):
        symmetric.launch("three_shot", parts=a, sums=a, flags=a, meetings=a, own_sum=x, residual=x, weight=x[0],
                         normed=x, rank=0, world=2)
