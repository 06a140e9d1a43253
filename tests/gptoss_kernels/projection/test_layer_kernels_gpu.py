"""The small kernels of a layer and the dense FP8 product on a GPU, against their plain forms; padding rows routed."""
from functools import partial

import pytest
import torch

from gptoss_kernels.reference.fused import norm_residual, rope_cache
from gptoss_kernels.reference.quant import quantise_groups
from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies, rope_table

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the interpreter stands in"),
]
HEADS, KV_HEADS, D, PAGE = 64, 8, 64, 64


def relative(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("rows", [1, 128, 5000])
def test_norm_residual(rows):
    from gptoss_kernels.projection import norm_residual_triton

    x, bias = torch.randn(rows, 2880, device="cuda").bfloat16(), torch.randn(2880, device="cuda").bfloat16()
    gain = torch.rand(2880, device="cuda") + 0.5
    ours, want = norm_residual_triton(x, gain, bias), norm_residual(x, gain, bias)
    assert relative(ours[0], want[0]) < 1e-4 and (ours[0] != want[0]).float().mean() < 1e-2
    assert torch.equal(ours[1], want[1])
    assert torch.equal(norm_residual_triton(x, gain)[0], ours[0])


@pytest.mark.parametrize("tokens", [1, 7, 128, 129, 8192])
@pytest.mark.parametrize("form", ["pages", "placed", "fp8", "fp8 placed"])
def test_rope_cache(tokens, form):
    from gptoss_kernels.rope import rope_cache_triton

    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * D, device="cuda").bfloat16()
    positions = torch.randint(0, 131072, (tokens,), dtype=torch.int32, device="cuda")
    cos, sin = rope_table(torch.arange(131072, device="cuda"), rope_frequencies(D).float().cuda(),
                          rope_concentration(32.0))
    pages = 2 * tokens // PAGE + 2
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens].int()
    slots[1::5] = -1
    made = []
    for run in (rope_cache_triton, rope_cache):
        kind, more = torch.bfloat16, {}
        if "fp8" in form:
            kind = torch.float8_e4m3fn
            ends = ((0.01, 0.03), (0.02, 0.01))
            more["scales"] = tuple(torch.linspace(a, b, KV_HEADS, device="cuda") for a, b in ends)
        if "placed" in form:
            whole = torch.zeros(tokens + 9, KV_HEADS, D, device="cuda").bfloat16()
            more |= {"keys": whole, "values": whole.clone()}
            more["rows"] = torch.arange(9, tokens + 9, device="cuda").flip(0).int().contiguous()
        k, v = (torch.zeros(pages, PAGE, KV_HEADS, D, device="cuda").to(kind) for _ in range(2))
        q = run(qkv, positions, cos, sin, k, v, slots, heads=HEADS, **more)
        made.append([q, k, v, *(more[name] for name in ("keys", "values") if name in more)])
    for name, ours, want in zip(("queries", "key pages", "value pages", "keys", "values"), *made, strict=False):
        different = (ours.float() != want.float()).float().mean()
        assert relative(ours.float(), want.float()) < 1e-3 and different < 1e-2, f"{name}: {different:.1e} differ"


@pytest.mark.parametrize("tokens", [1, 16, 17, 128, 1000])
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_fp8_linear(tokens, n, k):
    from gptoss_kernels.moe.gemm_cuda import obstacle
    from gptoss_kernels.projection import fp8_linear_align, row_plan
    from gptoss_kernels.projection.linear import fp8_linear_cuda

    if obstacle("cuda") is not None:
        pytest.skip(obstacle("cuda"))
    x, bias = torch.randn(tokens, k, device="cuda").bfloat16(), torch.randn(n, device="cuda")
    w = (40 * torch.randn(n, k, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)
    s = torch.rand(-(-n // 128), -(-k // 128), device="cuda") / 4096
    y = fp8_linear_cuda(x, w, s, bias, row_plan(tokens, fp8_linear_align("cuda", tokens), "cuda"))
    q, scale = quantise_groups(x)
    a = q.float() * scale.repeat_interleave(128, dim=1)[:, :k]
    exact = a @ (w.float() * s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]).T + bias
    assert y.shape == (tokens, n) and relative(y, exact) < 3e-3
    assert relative(y - fp8_linear_cuda(x, w, s, torch.zeros_like(bias),
                                        row_plan(tokens, fp8_linear_align("cuda", tokens), "cuda")),
                    bias.expand(tokens, n)) < 5e-2
    plan = row_plan(tokens, fp8_linear_align("cuda", tokens), "cuda")
    whole = torch.full((tokens + 200, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(fp8_linear_cuda(x, w, s, bias, plan, out=whole[:tokens]), y)
    assert whole[tokens:].isnan().all(), "no row beyond the last is written"
    base = torch.randn(tokens + 200, n, device="cuda").bfloat16()
    total = base.clone()
    assert torch.equal(fp8_linear_cuda(x, w, s, bias, plan, out=total[:tokens], add=True), base[:tokens] + y)
    assert torch.equal(total[tokens:], base[tokens:])


@pytest.mark.parametrize("backend", ["cuda", "staged", "triton"])
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize(("n", "k", "normed"), [(5120, 2880, True), (2880, 4096, False), (1296, 2880, True),
                                                (2880, 2048, False)])
def test_few_linear(backend, tokens, e4m3, n, k, normed):
    from gptoss_kernels import projection
    from gptoss_kernels.reference.fused import few_linear

    run = projection.few_linear_triton if backend == "triton" else projection.few_linear_cuda
    if backend == "staged":
        if tokens > 8:
            pytest.skip("at most 8 tokens are staged")
        run = partial(run, staged=True)
    x, bias = torch.randn(tokens, k, device="cuda").bfloat16(), torch.randn(n, device="cuda")
    more = {"norm_weight": torch.rand(k, device="cuda") + 0.5} if normed else {
        "residual": torch.randn(tokens, n, device="cuda").bfloat16()}
    weight = torch.randn(n, k, device="cuda") / k**0.5
    if e4m3:
        weight = (40 * weight * k**0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
        more["scale_inv"] = torch.rand(-(-n // 128), -(-k // 128), device="cuda") / 4096
    else:
        weight = weight.bfloat16()
    y = run(x, weight, bias, **more)
    wide = {name: value.float() for name, value in more.items()}
    exact = few_linear(x.float(), weight if e4m3 else weight.float(), bias, **wide)
    assert y.shape == (tokens, n) and relative(y, exact) < 5e-3


@pytest.mark.parametrize(("tokens", "real"), [(1, 0), (2, 1), (8, 5), (32, 20), (128, 77), (300, 130)])
def test_routing_of_padding_rows(tokens, real):
    """NaN in the padding rows reaches nothing: counts, places and the layer's real rows are those of the real rows."""
    from gptoss_kernels.moe import route

    x, gain = torch.randn(tokens, 2880, device="cuda").bfloat16(), torch.rand(2880, device="cuda") + 0.5
    w, b = torch.randn(128, 2880, device="cuda").bfloat16() / 54, torch.randn(128, device="cuda").bfloat16()
    x[real:] = torch.nan
    live = torch.tensor([real], dtype=torch.int32, device="cuda")
    r = route(x, w, b, norm_weight=gain, align=16, num_tokens=live)
    assert (r.ids[real:] == -1).all() and (r.row_of[real:] == -1).all() and int(r.counts.sum()) == 4 * real
    if real:
        whole = route(x.nan_to_num(), w, b, norm_weight=gain, align=16)
        assert torch.equal(r.ids[:real], whole.ids[:real]) and torch.equal(r.weights[:real], whole.weights[:real])
        rows = r.row_of[:real].flatten().long()
        assert len(rows.unique()) == 4 * real
        assert torch.equal(r.token_of[rows].long(), torch.arange(real, device="cuda").repeat_interleave(4))
