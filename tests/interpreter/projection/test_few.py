"""The dense product of a few tokens with its norm, bias and residual, in the interpreter against fp64."""
import pytest
import torch

from gptoss_kernels.projection import few_linear_triton
from gptoss_kernels.reference.fused import few_linear


def inputs(tokens, n, k, e4m3, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(tokens, k, generator=g).to(dtype), torch.randn(n, generator=g)
    more = {"norm_weight": torch.rand(k, generator=g) + 0.5, "residual": torch.randn(tokens, n, generator=g).to(dtype)}
    if e4m3:
        weight = (40 * torch.randn(n, k, generator=g)).to(torch.float8_e4m3fn)
        shape = (-(-n // 128), -(-k // 128))
        more["scale_inv"] = torch.exp2(torch.randint(-10, -5, shape, generator=g).float())
    else:
        weight = (torch.randn(n, k, generator=g) / k**0.5).to(dtype)
    return x, weight, bias, more


def exact(x, weight, bias, norm_weight=None, residual=None, scale_inv=None):
    x, w = x.double(), weight.double()
    if scale_inv is not None:
        w = w * scale_inv.double().repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, : w.shape[1]]
    if norm_weight is not None:
        x = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * norm_weight.double()
    return x @ w.T + bias.double() + (0 if residual is None else residual.double())


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 32])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("parts", [("norm_weight",), ("residual",), (), ("norm_weight", "residual")], ids=str)
def test_every_part(tokens, e4m3, parts):
    """Widths that are no multiples of 128, 32 or 16: the last block of each axis is partial."""
    x, weight, bias, more = inputs(tokens, 200, 320, e4m3)
    more = {name: value for name, value in more.items() if name in (*parts, "scale_inv")}
    want = exact(x, weight, bias, **more)
    for run in (few_linear_triton, few_linear):
        assert (run(x, weight, bias, **more) - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("e4m3", [False, True])
def test_bf16_rounds_like_the_plain_form(e4m3):
    x, weight, bias, more = inputs(3, 96, 2880, e4m3, torch.bfloat16)
    want = exact(x, weight, bias, **more)
    errors = [(run(x, weight, bias, **more).double() - want).norm() / want.norm()
              for run in (few_linear_triton, few_linear)]
    assert max(errors) < 4e-3 and errors[0] < 1.2 * errors[1]


def test_the_wide_form_and_each_scale_at_its_place():
    """4,100 rows take the wide tile; weights of ones with block scales 1, 2, 3, ... give sums of those."""
    k = 192
    scales = torch.arange(1.0, 67.0).view(33, 2)
    y = few_linear_triton(torch.ones(1, k), torch.ones(4100, k).to(torch.float8_e4m3fn), torch.zeros(4100),
                          scale_inv=scales)
    assert torch.allclose(y[0, [0, 127, 128, 4099]], torch.tensor([128.0 + 128, 256.0, 384 + 256, 128 * 65 + 64 * 66]))


def test_large_rows_do_not_overflow_before_the_norm():
    x, weight, bias, more = inputs(2, 48, 320, False)
    big = few_linear_triton(x * 1e15, weight, bias, norm_weight=more["norm_weight"])
    assert (big - few_linear_triton(x, weight, bias, norm_weight=more["norm_weight"])).abs().max() < 1e-3


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(33, 64)}, "1 to 32 rows"), ({"x": torch.zeros(2, 32)}, "for rows of 32"),
    ({"bias": torch.zeros(3)}, "bias"), ({"scale_inv": torch.ones(1, 1)}, "scales given"),
    ({"norm_weight": torch.ones(3)}, "norm weight"), ({"residual": torch.zeros(2, 3)}, "residual"),
    ({"weight": torch.zeros(64, 48).T}, "contiguous"),
])
def test_bad_input(change, message):
    good = {"x": torch.zeros(2, 64), "weight": torch.zeros(48, 64), "bias": torch.zeros(48)}
    with pytest.raises(ValueError, match=message):
        few_linear_triton(**{**good, **change})
