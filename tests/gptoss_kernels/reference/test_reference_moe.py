"""Routing, the clamped SwiGLU and the expert layer against exact values and against loops in numpy and float64."""
import numpy as np
import pytest
import torch

from gptoss_kernels.reference.experts import ExpertMatrices, dense_matrix, empty_matrices, moe
from gptoss_kernels.reference.moe import expert_mlp, route, swiglu
from gptoss_kernels.reference.quant import dequantise_blocks, mxfp4_decode

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]])


# -- routing ---------------------------------------------------------------------------------------------------------
def test_softmax_over_the_chosen():
    ids, weights = route(LOGITS, 4)
    assert ids.tolist() == [[0, 1, 2, 3]] and ids.dtype == torch.int64
    assert weights[0].tolist() == pytest.approx([0.643914, 0.236883, 0.087144, 0.032059], abs=5e-7)
    assert weights.sum().item() == pytest.approx(1.0, abs=3e-7)
    before = route(LOGITS, 4, softmax="before")[1]
    assert before[0, 0].item() == pytest.approx(0.632333, abs=5e-7)
    assert before.sum().item() == pytest.approx(0.982014, abs=5e-7)


def test_order_and_ties():
    """By descending logit; among equal ones the lowest id first, however many there are."""
    ids, weights = route(torch.tensor([[0.0, 5.0, 5.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert torch.equal(weights, torch.full((2, 3), 1 / 3))


def test_ties_of_many_experts_repeat():
    logits = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).mul(2).round().bfloat16()
    ids, _ = route(logits, 4)
    for row, chosen in zip(logits.float().tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(128), key=lambda e: (-row[e], e))[:4]


def test_weight_dtype():
    _, weights = route(LOGITS.bfloat16(), 4, torch.bfloat16)
    assert weights.dtype == torch.bfloat16
    assert weights.float()[0].tolist() == pytest.approx([0.643914, 0.236883, 0.087144, 0.032059], rel=2**-8)
    assert route(LOGITS.double(), 4, torch.float64)[1].sum().item() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("count", [0, 9])
def test_wrong_count(count):
    with pytest.raises(ValueError, match=f"{count} experts per token of 8"):
        route(LOGITS, count)


def test_wrong_softmax():
    with pytest.raises(ValueError, match="softmax is 'both'"):
        route(LOGITS, 4, softmax="both")


# -- SwiGLU ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gate, up, expected",
    [
        (1, 0, "8.457957659328e-01"), (20, 20, "5.599962502643e+01"), (7, 7, "5.599962502643e+01"),
        (10, 10, "5.5999625e+01"), (10, -10, "-4.1999719e+01"), (-10, 3, "-1.62318e-06"), (-20, -20, "1.976e-13"),
        (0.5, -1, "0.0e+00"), (2, -1, "0.0e+00"), (-3, 2, "-5.421392912336e-02"),
    ],
)
def test_swiglu_values(gate, up, expected):
    """To every digit given: gate clamped from above only, up on both sides, one added to up."""
    got = swiglu(torch.tensor([gate, up], dtype=torch.float64)).item()
    digits = len(expected.split("e")[0].split(".")[1])
    assert f"{got:.{digits}e}" == expected


def test_gate_and_up_alternate():
    """[1, 10, 2, 20]: gates 1 and 2, ups 10 and 20, both clamped to 7; as two halves it would be [2.537, 55.9996]."""
    got = swiglu(torch.tensor([1.0, 10.0, 2.0, 20.0], dtype=torch.float64))
    assert got.tolist() == pytest.approx([6.766366, 15.485269], abs=5e-7)


def test_other_constants():
    g, u = 3.0, 4.0
    got = swiglu(torch.tensor([g, u], dtype=torch.float64), alpha=1.0, limit=2.0).item()
    assert got == pytest.approx(2 / (1 + np.exp(-2)) * 3, rel=1e-14)


def test_swiglu_keeps_dtype_and_rounds_once():
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(swiglu(x), swiglu(x.double()).bfloat16())


# -- experts ---------------------------------------------------------------------------------------------------------
def weights(e=5, h=64, i=32, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) * 0.2

    return normal(e, 2 * i, h), normal(e, 2 * i), normal(e, h, i), normal(e, h)


def run(x, ids, share, gate_up, gate_up_bias, down, down_bias, **kwargs):
    dense = [ExpertMatrices("dense", m) for m in (gate_up, down)]
    return moe(x, ids, share, dense[0], gate_up_bias, dense[1], down_bias, **kwargs)


def loops(x, ids, share, gate_up, gate_up_bias, down, down_bias):
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for e, weight in zip(ids[t], share[t], strict=True):
            u = gate_up[e] @ x[t] + gate_up_bias[e]
            gate, up = np.minimum(u[0::2], 7), np.clip(u[1::2], -7, 7)
            out[t] += weight * (down[e] @ (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) + down_bias[e])
    return out


@pytest.mark.parametrize("count", [1, 2, 40])
def test_moe_against_loops(count):
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, 64, generator=g, dtype=torch.float64) * 3
    ids, share = route(torch.randn(count, 5, generator=g, dtype=torch.float64), 3, torch.float64)
    parts = weights()
    expected = loops(*(t.numpy() for t in (x, ids, share, *parts)))
    np.testing.assert_allclose(run(x, ids, share, *parts), expected, atol=1e-12)


def test_down_bias_is_weighted():
    """Zero down weights and biases 1..4 under the weights of LOGITS: 1.507347 (unweighted it would be 10)."""
    ids, share = route(LOGITS.double(), 4, torch.float64)
    gate_up, gate_up_bias, down, _ = weights(e=8, h=32)
    bias = torch.tensor([1.0, 2, 3, 4, 50, 60, 70, 80], dtype=torch.float64)[:, None].expand(8, 32)
    got = run(torch.ones(1, 32, dtype=torch.float64), ids, share, gate_up, gate_up_bias, 0 * down, bias)
    assert got[0].tolist() == pytest.approx([1.507347] * 32, abs=5e-7)


def test_experts_of_other_ranks_add_nothing():
    """Expert outputs [100, 200, 3, 5], a token to {2, 3} with .75 and .25: ranks give exactly 0 and 3.5."""
    outputs = torch.tensor([100.0, 200.0, 3.0, 5.0])[:, None].expand(4, 32)
    gate_up, gate_up_bias, down, _ = weights(e=4, h=32, dtype=torch.float32)
    x, ids, share = torch.ones(1, 32), torch.tensor([[2, 3]]), torch.tensor([[0.75, 0.25]])
    for first, expected in ((0, 0.0), (2, 3.5)):
        own = slice(first, first + 2)
        part = run(x, ids, share, gate_up[own], gate_up_bias[own], 0 * down[own], outputs[own], first_expert=first)
        assert (part == expected).all()


def test_ranks_add_up():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=g, dtype=torch.float64)
    ids, share = route(torch.randn(20, 5, generator=g, dtype=torch.float64), 3, torch.float64)
    parts = weights()
    ranks = [run(x, ids, share, *(p[a:b] for p in parts), first_expert=a) for a, b in ((0, 2), (2, 2), (2, 5))]
    assert (ranks[1] == 0).all()
    torch.testing.assert_close(sum(ranks), run(x, ids, share, *parts), atol=1e-13, rtol=0)


def test_only_chosen_experts_are_touched():
    """NaN in an expert that no token chose stays there."""
    parts = [p.clone() for p in weights(dtype=torch.float32)]
    for p in parts:
        p[3] = torch.nan
    got = run(torch.ones(2, 64), torch.tensor([[0, 1], [4, 2]]), torch.full((2, 2), 0.5), *parts)
    assert torch.isfinite(got).all()


def test_sum_in_fp32_for_bf16():
    """Contributions that cancel: 256 + 1 - 256 is 1 in fp32, 0 if the running sum were bf16."""
    bias = torch.tensor([256.0, 1.0, -256.0])[:, None].expand(3, 32).bfloat16()
    gate_up, gate_up_bias, down, _ = weights(e=3, h=32, dtype=torch.bfloat16)
    x, ids, share = torch.ones(1, 32).bfloat16(), torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    got = run(x, ids, share, gate_up, gate_up_bias, 0 * down, bias)
    assert got.dtype == torch.bfloat16 and (got == 1).all()


def test_expert_rows_are_out_in():
    """A down projection that is square and not symmetric: the transposed one gives something else."""
    gate_up, gate_up_bias, down, down_bias = (p[0] for p in weights(h=32))
    x = torch.ones(1, 32, dtype=torch.float64)
    got = expert_mlp(x, gate_up, gate_up_bias, down, down_bias)
    assert not torch.allclose(got, expert_mlp(x, gate_up, gate_up_bias, down.T, down_bias))
    assert torch.allclose(got, down @ swiglu(gate_up @ x[0] + gate_up_bias) + down_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_stored_forms(dtype):
    """moe over codes equals moe over the decoded matrices, bit for bit."""
    g = torch.Generator().manual_seed(0)
    stored, dense = [], []
    for out, into in ((64, 64), (64, 32)):
        blocks = torch.randint(0, 256, (5, out, into // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 126, (5, out, into // 32), generator=g, dtype=torch.uint8)
        stored.append(ExpertMatrices("mxfp4", blocks, scales))
        dense.append(ExpertMatrices("dense", mxfp4_decode(blocks, scales, dtype)))
    x = torch.randn(9, 64, generator=g).to(dtype)
    ids, share = route(torch.randn(9, 5, generator=g), 2)
    biases = [torch.randn(5, 64, generator=g).to(dtype) for _ in range(2)]
    results = [moe(x, ids, share, m[0], biases[0], m[1], biases[1]) for m in (stored, dense)]
    assert torch.equal(*results) and results[0].dtype == dtype


def test_dense_matrix_of_fp8():
    g = torch.Generator().manual_seed(0)
    values = torch.randn(2, 160, 96, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 1, generator=g)
    got = dense_matrix(ExpertMatrices("fp8", values, scales), 1, torch.bfloat16)
    assert torch.equal(got, dequantise_blocks(values[1], scales[1], dtype=torch.bfloat16))


def test_empty_matrices_have_the_shapes_of_the_form():
    for form, values, scales in (
        ("dense", (3, 160, 96), None), ("mxfp4", (3, 160, 3, 16), (3, 160, 3)), ("fp8", (3, 160, 96), (3, 2, 1)),
    ):
        made = empty_matrices(form, 3, 160, 96, torch.bfloat16)
        assert tuple(made.values.shape) == values
        assert (None if made.scales is None else tuple(made.scales.shape)) == scales
        assert dense_matrix(made, 0, torch.float32).shape == (160, 96)


def test_unknown_form():
    for call in (
        lambda: empty_matrices("int4", 1, 32, 32, torch.float32),
        lambda: dense_matrix(ExpertMatrices("int4", torch.zeros(1, 32, 32)), 0, torch.float32),
    ):
        with pytest.raises(ValueError, match="'int4'; 'dense', 'mxfp4' or 'fp8'"):
            call()


def test_layers_of_logits_are_routed_each_by_itself():
    logits = torch.randn(3, 5, 8)
    ids, weights = route(logits, 2)
    for layer in range(3):
        alone = route(logits[layer], 2)
        assert torch.equal(ids[layer], alone[0]) and torch.equal(weights[layer], alone[1])
