"""The public operation on the CPU: the reference against a dense softmax, known cases, choices and refusals."""
from __future__ import annotations

import pytest
import torch

from gptoss_kernels.attention import (
    AttentionError,
    LayerKind,
    PagedDecode,
    Prefill,
    paged_decode,
    paged_prefill,
    prefill,
)
from gptoss_kernels.attention.sinks import add_sink_to_lse, rescale_by_sink
from gptoss_kernels.reference.quant import Quantised, quantise_groups
from gptoss_kernels.registry import BackendUnavailable, backends


def dense(q, k, v, sinks, window=None):
    """One sequence by torch.softmax over [scores, sink] in fp64: q [T, H, D], k, v [T, Hkv, D]."""
    t, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / dim**0.5
    distance = torch.arange(t)[:, None] - torch.arange(t)[None, :]
    hidden = (distance < 0) | (distance >= (window or t))
    scores = scores.masked_fill(hidden, -torch.inf)
    scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, t, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :-1], v), torch.logsumexp(scores, -1).T


def tensors(t, heads=6, kv_heads=2, dim=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(t, h, dim, generator=g) for h in (heads, kv_heads, kv_heads))
    return q, k, v, torch.randn(heads, generator=g)


@pytest.mark.parametrize("window", [None, 1, 7])
def test_reference_equals_the_dense_softmax(window):
    q, k, v, sinks = tensors(33)
    expected, lse = dense(q, k, v, sinks, window)
    out, value = prefill(q, k, v, sinks, cu_seqlens_q=[0, 33], window=window, lse="with_sink", backend="reference")
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(value.double(), lse, atol=1e-6, rtol=1e-5)


def test_one_query_four_keys_and_a_sink():
    """Logits 1..4, values 10..40, sink 2: 32.126854, by prefill of the last position and by decode."""
    q = torch.ones(1, 1, 16)
    k = (torch.arange(1.0, 5.0) / 16).view(4, 1, 1).repeat(1, 1, 16)
    v = torch.arange(10.0, 41.0, 10.0).view(4, 1, 1).repeat(1, 1, 16)
    sink = torch.tensor([2.0])
    out = prefill(q, k, v, sink, cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 4], scale=1.0, backend="reference")
    assert out.unique().tolist() == pytest.approx([32.126854], abs=1e-5)
    for page_size in (1, 3, 4):
        pages = -(-4 // page_size)
        padded = [torch.cat([x, torch.full((pages * page_size - 4, 1, 16), torch.nan)]) for x in (k, v)]
        k_pages, v_pages = (x.view(pages, page_size, 1, 16).flip(0) for x in padded)
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None]
        where = {"page_table": table, "scale": 1.0, "backend": "reference"}
        lens = torch.tensor([4], dtype=torch.int32)
        for out in (paged_decode(q, k_pages, v_pages, sink, kv_lens=lens, **where),
                    paged_prefill(q, k_pages, v_pages, sink, cu_seqlens_q=[0, 1], kv_lens=lens, **where)):
            assert out.unique().tolist() == pytest.approx([32.126854], abs=1e-5)


def test_a_window_of_128_holds_128_keys():
    """Equal logits, V[j] = j, no sink: query 127 averages 0..127, query 128 averages 1..128."""
    q, k = torch.zeros(130, 1, 16), torch.zeros(130, 1, 16)
    v = torch.arange(130.0).view(130, 1, 1).repeat(1, 1, 16)
    out = prefill(q, k, v, None, cu_seqlens_q=[0, 130], window=128, backend="reference")[:, 0, 0]
    assert out[127].item() == pytest.approx(63.5) and out[128].item() == pytest.approx(64.5)


def test_rescaling_a_sinkless_result_equals_the_sink_in_the_softmax():
    q, k, v, sinks = tensors(20)
    sinks[0] = -torch.inf
    bare, lse = prefill(q, k, v, None, cu_seqlens_q=[0, 20], lse="without_sink", backend="reference")
    out, with_sink = prefill(q, k, v, sinks, cu_seqlens_q=[0, 20], lse="with_sink", backend="reference")
    torch.testing.assert_close(rescale_by_sink(bare.clone(), lse, sinks), out)
    torch.testing.assert_close(add_sink_to_lse(lse, sinks), with_sink)
    nothing = rescale_by_sink(torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf), torch.tensor([1.0, -torch.inf]))
    assert (nothing == 0).all()


def test_auto_says_what_it_passed_over():
    plan = Prefill(LayerKind(64, 8, 64), [0, 3], device="cpu")
    if plan.choice.backend == "reference":
        assert "not flashinfer-fa3" in plan.choice.reason and "not triton" in plan.choice.reason
    assert "order for full layers" in plan.choice.reason


@pytest.mark.parametrize("form", ["prefill", "paged_prefill", "paged_decode"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_every_form_has_its_backends(form, kind):
    layer = LayerKind(64, 8, 64, window=None if kind == "full" else 128)
    found = backends(f"attention.{form}.{kind}", layer=layer, device=torch.device("cpu"), lse=None, page_size=64)
    want = {"reference", "triton", "flashinfer-fa2", "xqa" if form == "paged_decode" else "flashinfer-fa3"}
    assert want <= set(found) and found["reference"] is None


@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3", "gluon"])
def test_a_backend_that_cannot_run_here_says_so(backend):
    with pytest.raises(BackendUnavailable, match=f"backend '{backend}' cannot run here"):
        Prefill(LayerKind(64, 8, 64), [0, 3], device="cpu", backend=backend)
    with pytest.raises(BackendUnavailable, match="has no backend 'fa4'"):
        Prefill(LayerKind(64, 8, 64), [0, 3], device="cpu", backend="fa4")


def test_xqa_refuses_an_lse_rather_than_ignore_it():
    with pytest.raises(BackendUnavailable, match="returns no LSE"):
        PagedDecode(LayerKind(64, 8, 64), batch=1, max_kv_len=64, page_size=64, device="cpu", lse="with_sink",
                    backend="xqa")
    with pytest.raises(BackendUnavailable, match="takes pages of 16, 32, 64 or 128 tokens, not 48"):
        PagedDecode(LayerKind(64, 8, 64), batch=1, max_kv_len=64, page_size=48, device="cpu", backend="xqa")


@pytest.mark.parametrize(("change", "message"), [
    ({"num_heads": 7}, "7 query heads are not a multiple of 2 key heads"),
    ({"head_dim": 48}, "head_dim is 48; a power of two from 16 to 256"),
    ({"dtype": torch.float64}, "dtype is torch.float64"),
    ({"window": 0}, "window is 0; it counts keys"),
    ({"scale": -1.0}, "scale is -1.0; a positive number"),
])
def test_a_layer_that_cannot_be(change, message):
    with pytest.raises(AttentionError, match=message):
        LayerKind(**{"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, **change})


@pytest.mark.parametrize(("change", "message"), [
    ({"q": torch.zeros(5, 6, 16)}, r"q has shape \(5, 6, 16\); \[4, 6, 16\]"),
    ({"k": torch.zeros(4, 2, 16, dtype=torch.float16)}, "k is torch.float16; torch.float32 is needed"),
    ({"v": torch.zeros(4, 2, 32)[..., ::2]}, "v has stride 2 in its last dimension"),
    ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\); one logit per query head, \[6\]"),
    ({"sinks": torch.zeros(6, dtype=torch.float16)}, "sinks is torch.float16; bfloat16 or float32"),
    ({"out": torch.zeros(4, 6, 8)}, r"out has shape \(4, 6, 8\)"),
    ({"cu_seqlens_q": [1, 4]}, r"cu_seqlens_q is \[1, 4\]; offsets that start at 0"),
    ({"cu_seqlens_q": [0, 3, 2]}, "never fall"),
    ({"cu_seqlens_k": [0, 2, 4]}, "cu_seqlens_q has 2 entries and cu_seqlens_k 3"),
    ({"lse": "yes"}, "lse is 'yes'; None, 'with_sink' or 'without_sink'"),
])
def test_prefill_names_the_argument_that_does_not_fit(change, message):
    q, k, v, sinks = tensors(4)
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "cu_seqlens_q": [0, 4], "backend": "reference", **change}
    with pytest.raises(AttentionError, match=message):
        prefill(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("sinks"), **given)


def test_paged_arguments_that_do_not_fit():
    layer = LayerKind(6, 2, 16, torch.float32)
    plan = PagedDecode(layer, batch=2, max_kv_len=32, page_size=16, device="cpu", backend="reference")
    table = torch.zeros(2, 2, dtype=torch.int32)
    for lens, pages, message in (
        (torch.tensor([1, 33]), table, "a sequence of 33 tokens does not fit 2 pages of 16"),
        (torch.tensor([1, -1]), table, "none negative"),
        (torch.tensor([1]), table, r"kv_lens has shape \(1,\); \[2\]"),
        (torch.tensor([1, 2]), torch.zeros(3, 2, dtype=torch.int32), r"page_table has shape \(3, 2\)"),
        (torch.tensor([1, 2]), table.long(), "int32"),
    ):
        with pytest.raises(AttentionError, match=message):
            plan.step(lens, pages)
    plan.step(torch.tensor([1, 32], dtype=torch.int32), table)
    q, cache = torch.zeros(2, 6, 16), torch.zeros(3, 16, 2, 16)
    with pytest.raises(AttentionError, match=r"v_pages has shape \(3, 8, 2, 16\)"):
        plan.run(q, cache, cache[:, :8], None)
    with pytest.raises(AttentionError, match="batch, max_kv_len and page_size are 0"):
        PagedDecode(layer, batch=0, max_kv_len=1, page_size=1, device="cpu")


def test_a_batch_without_queries_gives_nothing():
    empty = torch.zeros(0, 6, 16)
    out, lse = prefill(empty, torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), None, cu_seqlens_q=[0, 0], lse="with_sink")
    assert out.shape == (0, 6, 16) and lse.shape == (0, 6)


def e4m3_pages(heads=2, dim=16, pages=3, page_size=16, seed=0):
    """(codes in e4m3 [pages, page_size, heads, dim] twice, two fp32 scales [heads], what they mean in fp64)."""
    g = torch.Generator().manual_seed(seed)
    codes = [torch.randn(pages, page_size, heads, dim, generator=g).mul(60).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = tuple(torch.rand(heads, generator=g) / 50 + 0.005 for _ in range(2))
    return codes, scales, [c.double() * s.double()[:, None] for c, s in zip(codes, scales, strict=True)]


@pytest.mark.parametrize("window", [None, 7])
def test_reference_over_e4m3_pages_equals_the_dense_softmax(window):
    """40 tokens in three shuffled pages, prefill of all of them and decode of the last, against fp64."""
    codes, scales, meant = e4m3_pages()
    q, _, _, sinks = tensors(40)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    k, v = (x[table[0].long()].flatten(0, 1)[:40] for x in meant)
    expected, _ = dense(q, k, v, sinks, window)
    lens = torch.tensor([40], dtype=torch.int32)
    where = {"kv_lens": lens, "page_table": table, "window": window, "backend": "reference", "scales": scales}
    out = paged_prefill(q, *codes, sinks, cu_seqlens_q=[0, 40], **where)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    last = paged_decode(q[-1:].contiguous(), *codes, sinks, **where)
    torch.testing.assert_close(last.double(), expected[-1:], atol=1e-6, rtol=1e-5)
    other = paged_decode(q[-1:].contiguous(), *codes, sinks, **{**where, "scales": (scales[0] * 2, scales[1])})
    assert (other - last).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["paged_prefill", "paged_decode"])
@pytest.mark.parametrize("window", [None, 128])
def test_only_triton_and_the_reference_read_e4m3_pages(form, window):
    layer = LayerKind(64, 8, 64, window=window)
    needs = {"layer": layer, "device": torch.device("cpu"), "lse": None, "page_size": 64}
    kind = "full" if window is None else "sliding"
    found = backends(f"attention.{form}.{kind}", kv_dtype=torch.float8_e4m3fn, **needs)
    others = set(found) - {"triton", "reference"}
    assert found["reference"] is None and len(others) >= 2
    assert {found[name] for name in others} == {"is not wired for e4m3 pages; triton reads them"}
    assert found["triton"] == backends(f"attention.{form}.{kind}", **needs)["triton"]
    with pytest.raises(BackendUnavailable, match="xqa.*not wired for e4m3 pages"):
        PagedDecode(layer, batch=1, max_kv_len=64, page_size=64, device="cpu", backend="xqa",
                    kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(("change", "message"), [
    ({"scales": None}, "pages are torch.float8_e4m3fn and scales missing"),
    ({"k_pages": torch.zeros(3, 16, 2, 16), "v_pages": torch.zeros(3, 16, 2, 16)}, "torch.float32 and scales given"),
    ({"v_pages": torch.zeros(3, 16, 2, 16)}, "v_pages is torch.float32; torch.float8_e4m3fn is needed"),
    ({"scales": (torch.ones(2), torch.ones(3))}, r"the value scales are torch.float32 of shape \(3,\)"),
    ({"scales": (torch.ones(2).double(), torch.ones(2))}, "the key scales are torch.float64"),
    ({"scales": (torch.ones(2), torch.tensor([1.0, 0.0]))}, r"the value scales are \[1.0, 0.0\]; positive"),
    ({"k_pages": torch.zeros(3, 16, 2, 16, dtype=torch.float16)}, "kv_dtype is torch.float16; torch.float32, the"),
])
def test_scales_and_pages_that_do_not_fit(change, message):
    codes, scales, _ = e4m3_pages()
    given = {"k_pages": codes[0], "v_pages": codes[1], "scales": scales, "backend": "reference",
             "kv_lens": torch.tensor([40], dtype=torch.int32),
             "page_table": torch.tensor([[2, 0, 1]], dtype=torch.int32), **change}
    pages = given.pop("k_pages"), given.pop("v_pages")
    with pytest.raises(AttentionError, match=message):
        paged_decode(torch.zeros(1, 6, 16), *pages, None, **given)
    with pytest.raises(AttentionError, match=message):
        paged_prefill(torch.zeros(2, 6, 16), *pages, None, cu_seqlens_q=[0, 2], **given)


def e4m3_room(rows, columns=256, groups=2):
    """A Quantised of these rows, in NaN."""
    values = torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Quantised(values, torch.full((rows, groups), torch.nan))


@pytest.mark.parametrize("lse", [None, "with_sink"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_e4m3_are_the_rounded_rows_quantised(dtype, lse):
    """By the reference, in all three forms; rows behind the last stay as they are."""
    q, k, v, sinks = tensors(20, heads=4, kv_heads=2, dim=64)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    pages = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 12)).view(2, 16, 2, 64) for x in (k, v)]
    lens, table = torch.tensor([20], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    more = {"backend": "reference", "lse": lse}
    cached = {"kv_lens": lens, "page_table": table, **more}
    for run, rows in ((lambda **o: prefill(q, k, v, sinks, cu_seqlens_q=[0, 20], **more, **o), 20),
                      (lambda **o: paged_prefill(q[3:], *pages, sinks, cu_seqlens_q=[0, 17], **cached, **o), 17),
                      (lambda **o: paged_decode(q[-1:], *pages, sinks, **cached, **o), 1)):
        out = e4m3_room(rows + 3)
        got, plain = run(out=out), run()
        if lse is not None:
            (got, value), (plain, wanted) = got, plain
            assert torch.equal(value, wanted)
        assert got is out and out.scale[rows:].isnan().all() and (out.values[rows:].view(torch.uint8) == 0x7F).all()
        codes, scale = quantise_groups(plain.flatten(1))
        assert torch.equal(out.scale[:rows], scale)
        assert torch.equal(out.values[:rows].view(torch.uint8), codes.view(torch.uint8))


def test_a_batch_without_queries_leaves_e4m3_rows_alone():
    empty, out = torch.zeros(0, 4, 64), e4m3_room(2)
    got, lse = prefill(empty, torch.zeros(0, 2, 64), torch.zeros(0, 2, 64), None, cu_seqlens_q=[0, 0], lse="with_sink",
                       out=out)
    assert got is out and lse.shape == (0, 4) and out.scale.isnan().all()


@pytest.mark.parametrize(("change", "message"), [
    ({"values": torch.zeros(4, 256)}, r"out.values is torch.float32 of shape \(4, 256\); torch.float8_e4m3fn of at "
                                      r"least \[4, 256\] is needed"),
    ({"values": e4m3_room(3).values}, r"out.values is torch.float8_e4m3fn of shape \(3, 256\)"),
    ({"values": e4m3_room(4, 128).values}, r"out.values .* of shape \(4, 128\)"),
    ({"values": e4m3_room(4).values.view(4, 4, 64)}, r"out.values .* of shape \(4, 4, 64\)"),
    ({"values": e4m3_room(4, 512).values[:, :256]}, r"out.values has strides \(512, 1\); contiguous rows are needed"),
    ({"scale": torch.ones(4, 4)}, r"out.scale is torch.float32 of shape \(4, 4\); torch.float32 of at least \[4, 2\]"),
    ({"scale": torch.ones(4, 2).half()}, "out.scale is torch.float16"),
    ({"scale": torch.ones(4, 2, device="meta")}, "out.scale is on meta; cpu is needed"),
])
def test_room_for_e4m3_rows_that_does_not_fit(change, message):
    q, k, v, sinks = tensors(4, heads=4, kv_heads=2, dim=64)
    with pytest.raises(AttentionError, match=message):
        prefill(q, k, v, sinks, cu_seqlens_q=[0, 4], backend="reference", out=e4m3_room(4)._replace(**change))
