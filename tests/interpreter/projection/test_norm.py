"""RMSNorm with the output bias beside it, and the dense FP8 product, in the interpreter against the plain forms."""
import pytest
import torch

from gptoss_kernels.projection import fp8_linear_align, row_plan
from gptoss_kernels.projection.linear import fp8_linear_reference, fp8_linear_triton
from gptoss_kernels.projection.norm import norm_residual_triton
from gptoss_kernels.quant import norm_quantise
from gptoss_kernels.reference.fused import fp8_linear, norm_residual
from gptoss_kernels.reference.quant import quantise_groups
from gptoss_kernels.registry import BackendUnavailable, choose


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (5, 2880), (3, 224)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_norm_residual(rows, width, dtype, biased):
    x, gain = normal(rows, width).to(dtype), 1 + normal(width, seed=1) / 5
    bias = normal(width, seed=2).to(dtype) if biased else None
    ours, want = norm_residual_triton(x, gain, bias), norm_residual(x, gain, bias)
    exact = x.double() / (x.double().square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * gain.double()
    limit = 1e-6 if dtype == torch.float32 else 2**-8
    assert (ours[0].double() - exact).abs().max() <= limit * exact.abs().max()
    assert (ours[0] != want[0]).float().mean() <= 1e-3 or dtype == torch.float32
    if biased:
        assert torch.equal(ours[1], want[1])
    else:
        assert ours[1] is None and want[1] is None


def fp8_weight(rows, columns):
    values = (40 * normal(rows, columns, seed=3)).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, -5, (-(-rows // 128), -(-columns // 128)),
                                      generator=torch.Generator().manual_seed(4)).float())
    return values, scales


@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
@pytest.mark.parametrize("normed", [True, False])
def test_fp8_linear(tokens, normed):
    """Against the plain product of activations that were quantised first: what is left is the order of a sum."""
    x, (w, s), bias = normal(tokens, 192), fp8_weight(320, 192), normal(320, seed=5)
    gain = 1 + normal(192, seed=6) / 5 if normed else None
    plan = row_plan(tokens, fp8_linear_align("triton", tokens), "cpu")
    assert plan.rows % plan.align == 0 and plan.rows - tokens < plan.align and int(plan.tile_rows.sum()) == tokens
    y = fp8_linear_triton(x, w, s, bias, plan, gain)
    assert y.shape == (tokens, 320)
    q, scale = quantise_groups(norm_residual(x, gain)[0] if normed else x)
    a = q.double() * scale.double().repeat_interleave(128, dim=1)[:, :192]
    wide = w.double() * s.double().repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)[:, :192]
    exact = a @ wide.T + bias.double()
    limit = 1e-3 if normed else 1e-5                                     # a norm may move a value to the next code
    assert (y - exact).norm() <= limit * exact.norm()
    plain = fp8_linear(x, w, s, bias, gain)
    assert (y - plain).norm() <= 4e-2 * plain.norm()


@pytest.mark.parametrize("tokens", [3, 130])
def test_fp8_linear_into_given_memory(tokens):
    """Written there, or added to what is there: then the product is rounded first, and the sum once more."""
    x, (w, s), bias = normal(tokens, 192).bfloat16(), fp8_weight(320, 192), normal(320, seed=5)
    plan, base = row_plan(tokens, fp8_linear_align("triton", tokens), "cpu"), normal(tokens, 320, seed=7).bfloat16()
    y = fp8_linear_triton(x, w, s, bias, plan)
    out = torch.full_like(y, torch.nan)
    assert fp8_linear_triton(x, w, s, bias, plan, out=out) is out and torch.equal(out, y)
    assert torch.equal(fp8_linear_triton(x, w, s, bias, plan, out=base.clone(), add=True), base + y)
    assert not torch.equal(base + y, y)


@pytest.mark.parametrize("tokens", [3, 130])
def test_fp8_linear_of_rows_in_e4m3(tokens):
    """Rows that a kernel before has quantised give the same bits; the reference widens them."""
    x, (w, s), bias = normal(tokens, 192).bfloat16(), fp8_weight(320, 192), normal(320, seed=5)
    plan = row_plan(tokens, fp8_linear_align("triton", tokens), "cpu")
    made = norm_quantise(x, rows=plan.rows)
    y = fp8_linear_triton(made, w, s, bias, plan)
    assert y.dtype == torch.bfloat16 and torch.equal(y, fp8_linear_triton(x, w, s, bias, plan))
    plain = fp8_linear_reference(made, w, s, bias, plan, dtype=torch.float32)
    assert plain.shape == (tokens, 320) and (y - plain).norm() <= 4e-3 * plain.norm()
    with pytest.raises(ValueError, match=f"at least {plan.rows} rows of 192"):
        fp8_linear_triton(norm_quantise(x[:-1].contiguous()), w, s, bias, plan)
    with pytest.raises(ValueError, match="the norm comes before"):
        fp8_linear_triton(made, w, s, bias, plan, torch.ones(192))


def test_bad_input_and_choices():
    with pytest.raises(ValueError, match="weight has shape"):
        norm_residual_triton(torch.zeros(2, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        norm_residual_triton(torch.zeros(8, 2).T, torch.zeros(8))
    with pytest.raises(ValueError, match="its plan 3"):
        fp8_linear_triton(torch.zeros(2, 64), *fp8_weight(64, 64), torch.zeros(64), row_plan(3, 16, "cpu"))
    with pytest.raises(ValueError, match="at least 1"):
        row_plan(0, 16, "cpu")
    choice = choose("fp8_linear", device="cpu", dtype=torch.float32)
    assert choice.backend == "triton" and "not cuda: it needs an NVIDIA GPU" in choice.reason
    with pytest.raises(BackendUnavailable, match="float64"):
        choose("norm_residual", "triton", device="cpu", dtype=torch.float64)
