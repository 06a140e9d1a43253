"""The Hopper kernels on a Hopper GPU against dequantised fp32: every backend, any group sizes, NaN padding, graphs."""
from dataclasses import replace

import pytest
import torch

from gptoss_kernels.moe import LayerWeights, combine, group_layout, route
from gptoss_kernels.moe import deepgemm as deepgemm_backend
from gptoss_kernels.moe.decode_cuda import TILE, decode_gemm
from gptoss_kernels.moe.few_cuda import few_experts
from gptoss_kernels.moe.gemm_cuda import TILE_M, grouped_gemm, obstacle
from gptoss_kernels.moe.layer import moe_layer_cuda, moe_layer_deepgemm, moe_layer_reference, moe_layer_triton
from gptoss_kernels.moe.routing import router_logits
from gptoss_kernels.quant import norm_quantise
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.reference.moe import route as reference_route
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups, mxfp4_decode
from gptoss_kernels.registry import choose

REASON = obstacle("cuda" if torch.cuda.is_available() else None)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
BF16_OUT, E4M3_OUT, LAYER = 2e-3, 3e-2, 6e-2


def relative(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def fp8(experts, rows, columns, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    values = (40 * torch.randn(experts, rows, columns, generator=g, device="cuda")).clamp(-448, 448)
    scales = torch.exp2(torch.randint(-12, -8, (experts, -(-rows // 128), -(-columns // 128)), generator=g,
                                      device="cuda").float())
    return ExpertMatrices("fp8", values.to(torch.float8_e4m3fn), scales)


def mxfp4(experts, rows, columns, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    shape = (experts, rows, columns // 32)
    return ExpertMatrices("mxfp4", torch.randint(0, 256, (*shape, 16), generator=g, device="cuda", dtype=torch.uint8),
                          torch.randint(116, 122, shape, generator=g, device="cuda", dtype=torch.uint8))


def dense(m, e):
    return (dequantise_blocks if m.form == "fp8" else mxfp4_decode)(m.values[e], m.scales[e])


@pytest.mark.parametrize("sizes", [[7, 0, 130, 1], [0, 0, 900, 0], [64, 65, 128, 129], [1], [256, 300, 5, 0, 77],
                                   [3000, 2500, 0, 3100]])
@pytest.mark.parametrize(("rows", "columns"), [(512, 256), (2944, 2880), (640, 192), (384, 128), (256, 96)])
def test_grouped_gemm(sizes, rows, columns):
    plan = group_layout(sizes, TILE_M)
    m, bias = fp8(len(sizes), rows, columns), torch.randn(len(sizes), rows, device="cuda")
    q, scale = norm_quantise(torch.randn(plan.total, columns, device="cuda").bfloat16())
    real = torch.zeros(plan.total, dtype=torch.bool, device="cuda")
    exact = torch.zeros(plan.total, rows, device="cuda")
    for e, (start, size) in enumerate(zip(plan.starts, sizes, strict=True)):
        at = slice(start, start + size)
        real[at] = True
        exact[at] = dequantise_groups(q[at], scale[at]) @ dense(m, e).T + bias[e]
    q.view(torch.uint8)[~real] = 0x7F
    scale[~real] = torch.nan
    counts = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    y = grouped_gemm(q, scale, m.values, m.scales, bias, counts)
    assert relative(y[real], exact[real]) < BF16_OUT
    h, h_scale = grouped_gemm(q, scale, m.values, m.scales, bias, counts, swiglu=True)
    assert relative(dequantise_groups(h, h_scale)[real], swiglu(exact[real])) < E4M3_OUT
    token_of = torch.full((plan.total,), -1, dtype=torch.int32, device="cuda")
    token_of[real] = torch.randperm(sum(sizes) + 3, device="cuda")[3:].int()        # the same rows, shuffled
    shuffled = torch.full((sum(sizes) + 3, columns), 0x7F, dtype=torch.uint8, device="cuda")
    shuffled[token_of[real]] = q.view(torch.uint8)[real]
    gathered, gathered_scale = grouped_gemm(shuffled.view(torch.float8_e4m3fn), scale, m.values, m.scales, bias, counts,
                                            swiglu=True, token_of=token_of)
    assert torch.equal(gathered.view(torch.uint8)[real], h.view(torch.uint8)[real])
    assert torch.equal(gathered_scale[real], h_scale[real])
    none = grouped_gemm(q, scale, m.values, m.scales, None, counts)
    assert torch.equal(none[real], grouped_gemm(q, scale, m.values, m.scales, torch.zeros_like(bias), counts)[real])
    assert not torch.equal(none[real], y[real])


@pytest.mark.parametrize("make", [fp8, mxfp4])
@pytest.mark.parametrize("tokens", [1, 3, 17, 128])
def test_decode_gemm(make, tokens):
    experts, hidden, inner = 8, 320, 448
    up, down = make(experts, 2 * inner, hidden, 1), make(experts, hidden, inner, 2)
    up_bias, down_bias = torch.randn(experts, 2 * inner, device="cuda"), torch.randn(experts, hidden, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    router = torch.randn(experts, hidden, device="cuda").bfloat16()
    r = route(x, router, torch.zeros(experts, device="cuda"), align=TILE)
    q, s = norm_quantise(x)
    h, hs = decode_gemm(q, s, up, up_bias, r, gather=True, swiglu=True)
    y = decode_gemm(h, hs, down, down_bias, r)
    early, real = decode_gemm(h, hs, down, down_bias, r, overlapping=True), r.row_expert >= 0
    assert torch.equal(y[real], early[real])
    qx, hx = dequantise_groups(q, s), dequantise_groups(h, hs)
    for e in (r.counts > 0).nonzero().flatten().tolist():
        at = (r.row_expert == e).nonzero().flatten()
        assert relative(hx[at], swiglu(qx[r.token_of[at].long()] @ dense(up, e).T + up_bias[e])) < E4M3_OUT
        assert relative(y[at], hx[at] @ dense(down, e).T + down_bias[e]) < BF16_OUT


def layer(make, experts=16, hidden=320, inner=448):
    return LayerWeights(torch.rand(hidden, device="cuda").bfloat16() + 0.5,
                        torch.randn(experts, hidden, device="cuda").bfloat16(),
                        torch.randn(experts, device="cuda").bfloat16(), make(experts, 2 * inner, hidden, 1),
                        torch.randn(experts, 2 * inner, device="cuda"), make(experts, hidden, inner, 2),
                        torch.randn(experts, hidden, device="cuda"))


@pytest.mark.parametrize("make", [fp8, mxfp4])
@pytest.mark.parametrize("tokens", [1, 8, 9, 128, 129, 1000])
def test_layer_in_a_graph_for_new_tokens(make, tokens):
    """Captured with one input, replayed with another, routed otherwise: equal to running it, and to the reference."""
    w, x = layer(make), torch.randn(tokens, 320, device="cuda").bfloat16()
    backends = [moe_layer_cuda]
    if make is fp8:
        backends.append(moe_layer_triton)
        if deepgemm_backend.obstacle("cuda", expert_form="fp8") is None and tokens > 128:
            backends.append(moe_layer_deepgemm)
    for run in backends:
        run(x, w)
        torch.cuda.synchronize()
        graph, given = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            out = run(given, w)
        given.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(given, w))
        assert relative(out - given, moe_layer_reference(given.float(), w) - given.float()) < LAYER


@pytest.mark.parametrize("make", [fp8, mxfp4])
@pytest.mark.parametrize("experts", [16, 128])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_few_experts_in_a_graph(make, tokens, experts):
    """Replayed with other tokens, a padding row among them; every expert here, or some, whose shares then add up."""
    w, x = layer(make, experts), torch.randn(tokens, 320, device="cuda").bfloat16()
    real = torch.tensor([tokens], dtype=torch.int32, device="cuda")

    def run(w, **more):
        made = router_logits(given, w.router, w.router_bias, w.norm, w.norm_eps)
        return few_experts(given, *made, w, num_tokens=real, **more)

    given = x.clone()
    run(w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(w)
    for left in (tokens, tokens - 1):
        given.copy_(torch.randn_like(x))
        real.fill_(left)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        exact = moe_layer_reference(given.float(), w, num_tokens=real) - given.float()
        assert relative(out[:left] - given[:left], exact[:left]) < LAYER if left else True
        assert torch.equal(out[left:], given[left:])
    parts = [run(part_of(w, begin, begin + experts // 2), residual=False) for begin in (0, experts // 2)]
    assert relative(parts[0].float() + parts[1].float(), out.float() - given.float()) < 2e-2 if tokens > 1 else True


def part_of(w, first, last):
    """The layer of a rank that holds experts [first, last)."""
    held = {name: ExpertMatrices(m.form, m.values[first:last].contiguous(), m.scales[first:last].contiguous())
            for name, m in (("gate_up", w.gate_up), ("down", w.down))}
    return replace(w, **held, gate_up_bias=w.gate_up_bias[first:last].contiguous(),
                   down_bias=w.down_bias[first:last].contiguous(), first_expert=first)


@pytest.mark.parametrize("make", [fp8, mxfp4])
@pytest.mark.parametrize("tokens", [1, 9, 129, 3000])
def test_rows_that_are_quantised_and_routed_already(make, tokens):
    """The halves of the layer, out of a larger buffer and into memory that was given, by what the layer gives for the
    experts of a rank. A norm that is summed in another order may round otherwise; a single token's layer rounds nothing
    to e4m3 between its products."""
    w, x = layer(make), torch.randn(tokens, 320, device="cuda").bfloat16()
    held = {name: ExpertMatrices(m.form, m.values[4:13].contiguous(), m.scales[4:13].contiguous())
            for name, m in (("gate_up", w.gate_up), ("down", w.down))}
    part = replace(w, **held, gate_up_bias=w.gate_up_bias[4:13].contiguous(),
                   down_bias=w.down_bias[4:13].contiguous(), first_expert=4)
    needs = {"device": "cuda", "expert_form": w.gate_up.form}
    choice = choose("choose_experts", "cuda", **needs).function(x, w)
    out = torch.full_like(x, torch.nan)
    choose("moe", "cuda", **needs).function(
        norm_quantise(x, w.norm, rows=tokens + 200, norm_eps=w.norm_eps), *choice, part.gate_up, part.gate_up_bias,
        part.down, part.down_bias, alpha=w.alpha, limit=w.limit, first_expert=4, out=out)
    want = moe_layer_cuda(x, part, residual=False).float()
    assert (out.float() - want).norm() <= (4e-2 if tokens == 1 else 5e-3) * want.norm()


@pytest.mark.parametrize("tokens", [1, 8, 9, 128, 129, 3000])
def test_routing(tokens):
    x, gain = torch.randn(tokens, 2880, device="cuda").bfloat16(), torch.rand(2880, device="cuda").bfloat16()
    w, b = torch.randn(128, 2880, device="cuda").bfloat16() / 54, torch.randn(128, device="cuda").bfloat16()
    r = route(x, w, b, norm_weight=gain, align=128)
    ids, weights = reference_route(rms_norm(x, gain).double() @ w.double().T + b.double(), 4, torch.float64)
    same = (r.ids == ids).all(dim=1)
    assert same.float().mean() > 0.99 and (r.weights - weights)[same].abs().max() < 5e-3
    assert torch.equal(r.counts.long(), torch.bincount(r.ids.flatten().long(), minlength=128))
    rows = r.row_of.flatten().long()
    assert len(rows.unique()) == 4 * tokens
    assert torch.equal(r.token_of[rows].long(), torch.arange(tokens, device="cuda").repeat_interleave(4))
    y = torch.randn(r.rows, 2880, device="cuda").bfloat16()
    want = x.float() + (y[rows].float().view(tokens, 4, -1) * r.weights[..., None]).sum(dim=1)
    assert relative(combine(y, r.row_of, r.weights, residual=x), want) < 3e-3
