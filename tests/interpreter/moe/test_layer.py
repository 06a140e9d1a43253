"""The generic kernels and the whole layer in the interpreter, against fp64 and the plain reference."""
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import fp8_matrices, layer, relative

from gptoss_kernels.moe import NormInto, combine, group_layout
from gptoss_kernels.moe.gemm_triton import grouped_gemm
from gptoss_kernels.moe.layer import moe_layer_reference, moe_layer_triton
from gptoss_kernels.quant import empty_quantised, norm_quantise
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups
from gptoss_kernels.registry import BackendUnavailable, choose

ALIGN = 16


def laid_out(sizes: list[int], columns: int, seed: int = 0):
    """Quantised rows in their aligned places, padding rows NaN in values and scales; which are real; tile tables."""
    g = torch.Generator().manual_seed(seed)
    plan = group_layout(sizes, ALIGN)
    q, scale = norm_quantise(torch.randn(max(plan.total, ALIGN), columns, generator=g))
    real = torch.zeros(q.shape[0], dtype=torch.bool)
    for start, size in zip(plan.starts, sizes, strict=True):
        real[start : start + size] = True
    q.view(torch.uint8)[~real] = 0x7F
    scale[~real] = torch.nan
    experts = [e for e, rows in enumerate(plan.aligned) for _ in range(rows // ALIGN)] or [-1]
    rows = [min(ALIGN, size - i) for size in sizes for i in range(0, size, ALIGN)] or [0]
    return q, scale, real, torch.tensor(experts, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32), plan


def exact(q, scale, matrices, bias, sizes, plan):
    finite = torch.nan_to_num(q.float()).to(torch.float8_e4m3fn)
    a = dequantise_groups(finite, torch.nan_to_num(scale), dtype=torch.float64)
    w = dequantise_blocks(matrices.values, matrices.scales, dtype=torch.float64)
    out = torch.zeros(q.shape[0], w.shape[1], dtype=torch.float64)
    for e, (start, size) in enumerate(zip(plan.starts, sizes, strict=True)):
        out[start : start + size] = a[start : start + size] @ w[e].T + (0 if bias is None else bias[e].double())
    return out


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 7, 16, 17, 40]), min_size=1, max_size=5), st.sampled_from([64, 192]),
       st.sampled_from([96, 160]))
def test_grouped_gemm_any_group_sizes(sizes, columns, rows_of_weight):
    g = torch.Generator().manual_seed(1)
    m = fp8_matrices(g, len(sizes), rows_of_weight, columns)
    bias = torch.randn(len(sizes), rows_of_weight, generator=g)
    q, scale, real, experts, rows, plan = laid_out(sizes, columns)
    y = grouped_gemm(q, scale, m.values, m.scales, bias, experts, rows, dtype=torch.float32)
    want = exact(q, scale, m, bias, sizes, plan)
    assert torch.isfinite(y[real]).all()
    if any(sizes):
        assert relative(y[real], want[real]) < 1e-5


def test_group_sizes_of_the_published_case_with_nan_padding():
    sizes = [7, 0, 130, 1]
    g = torch.Generator().manual_seed(2)
    m, bias = fp8_matrices(g, 4, 128, 192), torch.randn(4, 128, generator=g)
    q, scale, real, experts, rows, plan = laid_out(sizes, 192)
    y = grouped_gemm(q, scale, m.values, m.scales, bias, experts, rows, dtype=torch.float32)
    assert relative(y[real], exact(q, scale, m, bias, sizes, plan)[real]) < 1e-5


def test_zero_bias_is_no_bias_and_each_bias_matters():
    sizes = [5, 20]
    g = torch.Generator().manual_seed(3)
    m = fp8_matrices(g, 2, 96, 64)
    q, scale, real, experts, rows, _ = laid_out(sizes, 64)

    def run(bias):
        return grouped_gemm(q, scale, m.values, m.scales, bias, experts, rows, dtype=torch.float32)[real]

    none = run(None)
    assert torch.equal(none, run(torch.zeros(2, 96)))
    bias = torch.zeros(2, 96)
    bias[1, 95] = 1.0
    changed = run(bias) - none
    assert torch.equal(changed.nonzero()[:, 1].unique(), torch.tensor([95]))
    assert (changed[:5] == 0).all() and torch.allclose(changed[5:, 95], torch.ones(20), atol=1e-3)


@pytest.mark.parametrize("stray", [0x00, 0xFF])
def test_bytes_around_the_scales_do_not_matter(stray):
    """Scales as views inside buffers full of 0xFF (NaN): same result as inside zeros. K ends half-way into a block."""
    sizes, columns = [1, 18], 192
    g = torch.Generator().manual_seed(4)
    m = fp8_matrices(g, 2, 160, columns)
    q, scale, real, experts, rows, _ = laid_out(sizes, columns)
    plain = grouped_gemm(q, scale, m.values, m.scales, None, experts, rows)

    def inside(t):
        buffer = torch.full((t.numel() * 4 + 512,), stray, dtype=torch.uint8)
        view = buffer[256 : 256 + t.numel() * 4].view(torch.float32).view(t.shape)
        view.copy_(t)
        return view

    framed = grouped_gemm(q, inside(scale), m.values, inside(m.scales), None, experts, rows)
    assert torch.equal(plain[real], framed[real]) and torch.isfinite(framed[real]).all()


def test_partial_blocks_have_their_own_scale():
    """2880 rows have 23 scale rows, the last over 64: weights of ones with scale row i + 1 give row sums of it."""
    m = ExpertMatrices("fp8", torch.ones(1, 2880, 64).to(torch.float8_e4m3fn),
                       torch.arange(1.0, 24.0)[None, :, None].contiguous())
    q, scale = norm_quantise(torch.ones(16, 64))
    y = grouped_gemm(q, scale, m.values, m.scales, None, torch.zeros(1, dtype=torch.int32),
                     torch.full((1,), 16, dtype=torch.int32), dtype=torch.float32)
    assert torch.allclose(y[0, [0, 127, 128, 255, 2879]] / 64, torch.tensor([1.0, 1, 2, 2, 23]))


@pytest.mark.parametrize("tokens", [1, 9, 131])
def test_layer_equals_the_reference_up_to_activation_rounding(tokens):
    w = layer()
    x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(tokens))
    ours, plain = moe_layer_triton(x, w), moe_layer_reference(x, w)
    assert relative(ours - x, plain - x) < 6e-2                         # two e4m3 roundings of activations, 3 % each
    assert torch.allclose(moe_layer_triton(x, w, residual=False) + x, ours, atol=1e-5)


def test_down_bias_is_weighted_and_counts_once():
    """Zero down weights, biases 1 to 4: 1.507347, the softmax-weighted mean; unweighted it would be 10."""
    w = layer(experts=8)
    zero = ExpertMatrices("fp8", torch.zeros_like(w.down.values), w.down.scales)
    biases = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0])[:, None].expand(8, 192).contiguous()
    logits = torch.tensor([3.0, 2, 1, 0, -1, -2, -3, -4])
    w = layer(experts=8, down=zero, down_bias=biases, router=torch.zeros(8, 192), router_bias=logits)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    for out in (moe_layer_triton(x, w, residual=False), moe_layer_reference(x, w, residual=False)):
        assert torch.allclose(out, torch.full_like(out, 1.507347), atol=1e-5)


@pytest.mark.parametrize("field", ["gate_up_bias", "down_bias", "router_bias", "norm"])
def test_every_part_of_the_layer_is_used(field):
    w = layer()
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    changed = layer(**{field: getattr(w, field) * 1.5 + 0.5})
    assert relative(moe_layer_triton(x, changed), moe_layer_triton(x, w)) > 1e-3


def test_experts_on_two_ranks_add_up_and_an_empty_rank_gives_zero():
    w = layer(experts=8)
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(2))
    whole, parts = moe_layer_triton(x, w, residual=False), torch.zeros(20, 192)
    for first in (0, 4):
        cut = slice(first, first + 4)
        held = {n: ExpertMatrices("fp8", m.values[cut].contiguous(), m.scales[cut].contiguous())
                for n, m in (("gate_up", w.gate_up), ("down", w.down))}
        part = layer(experts=8, **held, gate_up_bias=w.gate_up_bias[cut], down_bias=w.down_bias[cut],
                     first_expert=first)
        parts += moe_layer_triton(x, part, residual=False)
    assert relative(parts, whole) < 1e-6
    away = layer(experts=8, router_bias=torch.tensor([0.0, 0, 0, 0, 99, 99, 99, 99]), gate_up_bias=w.gate_up_bias[:4],
                 down_bias=w.down_bias[:4], gate_up=ExpertMatrices("fp8", w.gate_up.values[:4], w.gate_up.scales[:4]),
                 down=ExpertMatrices("fp8", w.down.values[:4], w.down.scales[:4]))
    assert (moe_layer_triton(x, away, residual=False) == 0).all()


def test_combine_with_the_bias_riding_along():
    g = torch.Generator().manual_seed(5)
    y, residual, bias = (torch.randn(rows, 40, generator=g) for rows in (12, 3, 4))
    row_of = torch.tensor([[0, 5], [11, -1], [2, 3]], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [2, 1], [1, 0]], dtype=torch.int32)
    weights = torch.rand(3, 2, generator=g)
    want = residual.clone()
    for t in range(3):
        for k in range(2):
            if row_of[t, k] >= 0:
                want[t] += weights[t, k] * (y[row_of[t, k]] + bias[ids[t, k]])
    assert torch.allclose(combine(y, row_of, weights, residual=residual, ids=ids, bias=bias), want, atol=1e-6)
    with pytest.raises(ValueError, match="belong together"):
        combine(y, row_of, weights, bias=bias)


@pytest.mark.parametrize("width", [40, 320, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_with_the_norm_of_what_comes_next(width, dtype):
    """The same rows as without it; the norm is what a launch of its own makes of them, but for sums in another order.
    Rows behind the last keep what they held."""
    g = torch.Generator().manual_seed(6)
    y, residual = torch.randn(12, width, generator=g).to(dtype), torch.randn(3, width, generator=g).to(dtype)
    row_of = torch.tensor([[0, 5], [11, -1], [-1, -1]], dtype=torch.int32)
    weights, gain = torch.rand(3, 2, generator=g), torch.rand(width, generator=g) + 0.5
    into = empty_quantised(5, width, "cpu")
    into.values.view(torch.uint8).fill_(0x7F)
    into.scale.fill_(torch.nan)
    out = combine(y, row_of, weights, residual=residual, norm=NormInto(gain, 1e-5, into))
    assert torch.equal(out, combine(y, row_of, weights, residual=residual))
    apart = norm_quantise(out, gain)
    same = (into.values[:3].view(torch.uint8) == apart.values.view(torch.uint8)).float().mean()
    assert same > 0.999 and torch.allclose(into.scale[:3], apart.scale, rtol=1e-2, atol=0)
    exact = rms_norm(out.double(), gain.double(), 1e-5)
    assert (dequantise_groups(into.values[:3], into.scale[:3]) - exact).norm() <= 4e-2 * exact.norm()
    assert into.values[3:].float().isnan().all() and into.scale[3:].isnan().all()
    with pytest.raises(ValueError, match="at least 3 rows"):
        combine(y, row_of, weights, residual=residual, norm=NormInto(gain, 1e-5, empty_quantised(2, width, "cpu")))


def test_auto_says_why_and_explicit_choices_do_not_fall_back():
    choice = choose("moe_layer", device="cpu", expert_form="fp8")
    assert choice.backend == "triton" and "not cuda: it needs an NVIDIA GPU" in choice.reason
    assert choose("moe_layer", device="cpu", expert_form="mxfp4").backend == "reference"
    with pytest.raises(BackendUnavailable, match="NVIDIA GPU"):
        choose("moe_layer", "cuda", device="cpu", expert_form="fp8")
    with pytest.raises(BackendUnavailable, match="it is 'mxfp4'"):
        choose("moe_layer", "deepgemm", device="cpu", expert_form="mxfp4")


@pytest.mark.parametrize("tokens", [4, 130])
def test_experts_alone_for_choices_made_elsewhere(tokens):
    """The operation "moe": int64 ids from a router of the caller's, half of the experts held here."""
    w = layer(experts=8)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 192, generator=g)
    ids = torch.stack([torch.randperm(8, generator=g)[:4] for _ in range(tokens)])
    weights = torch.rand(tokens, 4, generator=g)
    held = {n: ExpertMatrices("fp8", m.values[2:6].contiguous(), m.scales[2:6].contiguous())
            for n, m in (("up", w.gate_up), ("down", w.down))}
    arguments = (x, ids, weights, held["up"], w.gate_up_bias[2:6], held["down"], w.down_bias[2:6])
    ours = choose("moe", "triton", device="cpu", expert_form="fp8").function(*arguments, first_expert=2)
    plain = choose("moe", "reference").function(*arguments, first_expert=2)
    assert relative(ours, plain) < 6e-2
    assert (ours[((ids < 2) | (ids >= 6)).all(dim=1)] == 0).all()


@pytest.mark.parametrize(("tokens", "real"), [(8, 5), (16, 1), (131, 90)])
def test_padding_rows_pass_through_and_change_nothing(tokens, real):
    """Two fillings of the padding rows: the same bits in the real rows, and the padding rows come out as given."""
    w = layer(experts=8)
    x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(tokens))
    live = torch.tensor([real], dtype=torch.int32)
    other = x.clone()
    other[real:] = 1e3 * torch.randn(tokens - real, 192, generator=torch.Generator().manual_seed(1))
    for run in (moe_layer_triton, moe_layer_reference):
        a, b = run(x, w, num_tokens=live), run(other, w, num_tokens=live)
        assert torch.equal(a[:real], b[:real])
        assert torch.equal(a[real:], x[real:]) and torch.equal(b[real:], other[real:])
        assert relative(a[:real] - x[:real], run(x, w)[:real] - x[:real]) < 1e-6
        assert (run(x, w, residual=False, num_tokens=live)[real:] == 0).all()


@pytest.mark.parametrize("tokens", [9, 131])
@pytest.mark.parametrize("first", [0, 3])
def test_rows_that_are_quantised_and_routed_already(tokens, first):
    """The halves of the layer, by what `moe_layer` gives for the experts of a rank; into memory that was given."""
    w = layer(experts=6)
    cut = slice(first, first + 3)
    held = {name: ExpertMatrices("fp8", m.values[cut].contiguous(), m.scales[cut].contiguous())
            for name, m in (("gate_up", w.gate_up), ("down", w.down))}
    biases = {name: getattr(w, name)[cut].contiguous() for name in ("gate_up_bias", "down_bias")}
    part = replace(w, **held, **biases, first_expert=first)
    x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(tokens))
    want = moe_layer_triton(x, part, residual=False)
    choice = choose("choose_experts", "triton", expert_form="fp8").function(x, w)
    experts = choose("moe", "triton", expert_form="fp8").function
    out = torch.full((tokens, 192), torch.nan)
    given = {"first_expert": first, "dtype": torch.float32, "out": out}
    got = experts(norm_quantise(x, w.norm, rows=tokens + 5), *choice, part.gate_up, part.gate_up_bias, part.down,
                  part.down_bias, **given)
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, want)
    plain = choose("choose_experts", "reference").function(x, w)
    assert torch.equal(plain[0], choice[0].long()) and torch.allclose(plain[1], choice[1], atol=1e-5)
    reference = choose("moe", "reference").function(
        norm_quantise(x, w.norm, rows=tokens + 5), *plain, part.gate_up, part.gate_up_bias, part.down, part.down_bias,
        **given)
    assert reference is out and relative(out, want) < 6e-2
