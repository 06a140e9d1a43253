"""Every backend that this GPU has, against fp64: gpt-oss's heads and other ratios, any lengths, any sinks."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptoss_kernels.attention import LayerKind, PagedDecode, PagedPrefill, Prefill, paged_decode, paged_prefill, prefill
from gptoss_kernels.quant import empty_quantised, norm_quantise
from gptoss_kernels.reference.attention import log_sum_exp_without_sink, sink_attention
from gptoss_kernels.reference.quant import dequantise_groups
from gptoss_kernels.registry import backends

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}   # relative error, norm over norm
LSE_TOLERANCE = 2e-3                # in nats; scores come from bf16 operands in fp32
SINKS = [-torch.inf, -30.0, 0.0, 1.5, 12.0, 60.0]
SHAPES = [(64, 8, 64), (8, 8, 64), (12, 4, 64), (16, 1, 64), (32, 8, 128)]


def ready(form: str, window: int | None, heads: int, kv_heads: int, dim: int, dtype=torch.bfloat16) -> list[str]:
    """Backends of a form that can run here for these heads; the reference, which judges, left out."""
    layer = LayerKind(heads, kv_heads, dim, dtype, window)
    kind = "full" if window is None else "sliding"
    found = backends(f"attention.{form}.{kind}", layer=layer, device=torch.device("cuda"), lse=None, page_size=64)
    return [name for name, obstacle in found.items() if obstacle is None and name != "reference"]


def built(names: list[str], dim: int, window: int | None, kv_ratio: int = 8) -> list[str]:
    """Only the FlashInfer modules of gpt-oss's own shape are worth minutes of compiling in a test."""
    return [n for n in names if n in ("triton", "gluon")
            or (dim == 64 and not (n == "flashinfer-fa3" and window) and (n != "xqa" or kv_ratio == 8))]


def batch(q_lens, k_lens, shape, dtype=torch.bfloat16, sinks=None, seed=0, spread=1.0):
    g = torch.Generator("cuda").manual_seed(seed)
    heads, kv_heads, dim = shape
    cu_q, cu_k = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (q_lens, k_lens))
    q = (torch.randn(cu_q[-1], heads, dim, generator=g, device="cuda") * spread).to(dtype)
    k, v = (torch.randn(cu_k[-1], kv_heads, dim, generator=g, device="cuda").to(dtype) for _ in range(2))
    s = torch.randn(heads, generator=g, device="cuda") * 2
    if sinks:
        s = torch.tensor([sinks[h % len(sinks)] for h in range(heads)], device="cuda")
    return q, k, v, s, cu_q, cu_k


def expected(q, k, v, s, cu_q, cu_k, window):
    where = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "window": window, "dtype": torch.float64}
    out, lse = sink_attention(q.double(), k.double(), v.double(), s, query_block=256, **where)
    return out, lse, log_sum_exp_without_sink(q.double(), k.double(), **where)


def to_pages(k, v, cu_k, page_size, seed=0):
    """Shuffled pages; rows and pages that hold no token are random, so that counting one shows."""
    lens = torch.tensor(cu_k).diff()
    used = [-(-int(n) // page_size) for n in lens]
    order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(seed))
    pages = [torch.randn(sum(used) + 3, page_size, *x.shape[1:], device="cuda").to(x.dtype) for x in (k, v)]
    table = torch.zeros(len(used), max([1, *used]), dtype=torch.int32)
    place = 0
    for b, n in enumerate(used):
        for j in range(n):
            table[b, j] = page = int(order[place])
            place += 1
            rows = slice(cu_k[b] + j * page_size, min(cu_k[b] + (j + 1) * page_size, cu_k[b + 1]))
            for cache, x in zip(pages, (k, v), strict=True):
                cache[page, : rows.stop - rows.start] = x[rows]
    return *pages, lens.int(), table


def close(name, actual, wanted, dtype):
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error = float((actual.double() - wanted).norm() / wanted.norm().clamp_min(1e-9))
    assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e}"


def lse_close(name, actual, wanted):
    assert torch.equal(actual == -torch.inf, wanted == -torch.inf), f"{name}: -inf elsewhere"
    seen = wanted != -torch.inf
    assert float((actual.double() - wanted)[seen].abs().max()) < LSE_TOLERANCE, f"{name}: LSE"


@pytest.mark.parametrize(("shape", "window", "sink_dtype"), [
    *((SHAPES[0], window, dtype) for window in (None, 128) for dtype in (torch.float32, torch.bfloat16)),
    (SHAPES[0], 77, torch.float32), *((shape, window, torch.float32) for shape in SHAPES[1:] for window in (None, 128)),
])
def test_prefill(shape, window, sink_dtype):
    q, k, v, s, cu_q, cu_k = batch([1, 127, 300, 64], [1, 127, 1000, 2000], shape, sinks=SINKS)
    s = s.to(sink_dtype)
    out, with_sink, without = expected(q, k, v, s, cu_q, cu_k, window)
    for name in built(ready("prefill", window, *shape), shape[2], window):
        for lse, wanted in (("with_sink", with_sink), ("without_sink", without)):
            got, value = prefill(q, k, v, s, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=window, lse=lse, backend=name)
            close(f"{name} {lse}", got, out, torch.bfloat16)
            lse_close(f"{name} {lse}", value, wanted)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_paged_prefill(window, page_size):
    shape = (64, 8, 64)
    q, k, v, s, cu_q, cu_k = batch([1, 128, 333], [129, 128, 3000], shape, sinks=SINKS)
    k_pages, v_pages, lens, table = to_pages(k, v, cu_k, page_size)
    out, with_sink, without = expected(q, k, v, s, cu_q, cu_k, window)
    for name in built(ready("paged_prefill", window, *shape), 64, window):
        for lse, wanted in (("with_sink", with_sink), ("without_sink", without)):
            got, value = paged_prefill(q, k_pages, v_pages, s, cu_seqlens_q=cu_q, kv_lens=lens, page_table=table,
                                       window=window, lse=lse, backend=name)
            close(name, got, out, torch.bfloat16)
            lse_close(f"{name} {lse}", value, wanted)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("lens", [[1, 127, 128, 129, 8192], [5000], [300] * 40])
def test_paged_decode(window, lens):
    shape = (64, 8, 64)
    q, k, v, s, cu_q, cu_k = batch([1] * len(lens), lens, shape, sinks=SINKS)
    k_pages, v_pages, kv_lens, table = to_pages(k, v, cu_k, 64)
    out, with_sink, without = expected(q, k, v, s, cu_q, cu_k, window)
    for name in built(ready("paged_decode", window, *shape), 64, window):
        where = {"kv_lens": kv_lens, "page_table": table, "window": window, "backend": name}
        close(name, paged_decode(q, k_pages, v_pages, s, **where), out, torch.bfloat16)
        if name != "xqa":
            for lse, wanted in (("with_sink", with_sink), ("without_sink", without)):
                got, value = paged_decode(q, k_pages, v_pages, s, lse=lse, **where)
                close(f"{name} {lse}", got, out, torch.bfloat16)
                lse_close(f"{name} {lse}", value, wanted)


def in_e4m3(k, v):
    """Codes, fp32 scales of each key head, and what both mean together in fp64."""
    heads = torch.arange(1, k.shape[1] + 1, device=k.device)
    scales = tuple((x.abs().amax(dim=(0, 2)).float() / 448 * (1 + heads / 10)).contiguous() for x in (k, v))
    codes = [(x.float() / s[:, None]).to(torch.float8_e4m3fn) for x, s in zip((k, v), scales, strict=True)]
    return codes, scales, [c.double() * s.double()[:, None] for c, s in zip(codes, scales, strict=True)]


def ready_for_e4m3(form, window, shape):
    kind = "full" if window is None else "sliding"
    found = backends(f"attention.{form}.{kind}", layer=LayerKind(*shape, window=window), device=torch.device("cuda"),
                     lse=None, page_size=64, kv_dtype=torch.float8_e4m3fn)
    names = [name for name, obstacle in found.items() if obstacle is None and name != "reference"]
    assert "triton" in names
    return names


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", [(64, 8, 64), (12, 4, 64)])
def test_prefill_over_e4m3_pages(shape, window):
    q, k, v, s, cu_q, cu_k = batch([1, 128, 333], [129, 128, 3000], shape, sinks=SINKS)
    codes, scales, meant = in_e4m3(k, v)
    k_pages, v_pages, lens, table = to_pages(*codes, cu_k, 64)
    out, with_sink, _ = expected(q, *meant, s, cu_q, cu_k, window)
    for name in ready_for_e4m3("paged_prefill", window, shape):
        got, value = paged_prefill(q, k_pages, v_pages, s, cu_seqlens_q=cu_q, kv_lens=lens, page_table=table,
                                   window=window, lse="with_sink", backend=name, scales=scales)
        close(name, got, out, torch.bfloat16)
        lse_close(name, value, with_sink)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("lens", [[1, 127, 128, 129, 8192], [5000], [300] * 40])
def test_decode_over_e4m3_pages(window, lens):
    shape = (64, 8, 64)
    q, k, v, s, cu_q, cu_k = batch([1] * len(lens), lens, shape, sinks=SINKS)
    codes, scales, meant = in_e4m3(k, v)
    k_pages, v_pages, kv_lens, table = to_pages(*codes, cu_k, 64)
    out, with_sink, _ = expected(q, *meant, s, cu_q, cu_k, window)
    for name in ready_for_e4m3("paged_decode", window, shape):
        where = {"kv_lens": kv_lens, "page_table": table, "window": window, "backend": name}
        got, value = paged_decode(q, k_pages, v_pages, s, lse="with_sink", scales=scales, **where)
        close(name, got, out, torch.bfloat16)
        lse_close(name, value, with_sink)
        doubled = paged_decode(q, k_pages, v_pages, s, scales=(scales[0], scales[1] * 2), **where)
        close(f"{name}, value scales doubled", doubled, 2 * out, torch.bfloat16)


def check_e4m3_output(plan, given, exact):
    """A plan's e4m3 rows, in poisoned room with more rows, are those that `norm_quantise` makes of its ordinary output,
    bit for bit, and near fp64; rows behind the last stay poisoned."""
    plain, lse = plan.run(*given)
    t, columns = len(plain), plain[0].numel()
    out = empty_quantised(-(-t // 128) * 128 + 128, columns, "cuda")
    out.values.view(torch.uint8).fill_(0x7F)
    out.scale.fill_(torch.nan)
    got, again = plan.run(*given, out=out)
    wanted, name = norm_quantise(plain.flatten(1)), plan.choice.backend
    assert got is out and torch.equal(lse, again), name
    assert torch.equal(out.scale[:t], wanted.scale), f"{name}: scales"
    assert torch.equal(out.values[:t].view(torch.uint8), wanted.values.view(torch.uint8)), f"{name}: codes"
    assert (out.values[t:].view(torch.uint8) == 0x7F).all() and out.scale[t:].isnan().all(), f"{name}: other rows"
    meant, exact = dequantise_groups(out.values[:t], out.scale[:t], dtype=torch.float64), exact.flatten(1)
    assert float((meant - exact).norm() / exact.norm()) < 0.04, name


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_into_e4m3_rows(shape, window):
    seed = torch.seed() % 1000                                              # other numbers in every run
    q, k, v, s, cu_q, cu_k = batch([1, 127, 300, 65], [1, 127, 1000, 2000], shape, sinks=SINKS, seed=seed)
    exact = expected(q, k, v, s, cu_q, cu_k, window)[0]
    for name in built(ready("prefill", window, *shape), shape[2], window):
        for lse in ("with_sink", "without_sink"):
            plan = Prefill(LayerKind(*shape, window=window), cu_q, cu_k, device="cuda", backend=name, lse=lse)
            assert getattr(plan._kernel, "quantises", False) == (
                name in ("triton", "gluon") and shape[0] // shape[1] * shape[2] % 128 == 0), name
            check_e4m3_output(plan, (q, k, v, s), exact)


@pytest.mark.parametrize("window", [None, 128])
def test_paged_prefill_into_e4m3_rows(window):
    shape = (64, 8, 64)
    q, k, v, s, cu_q, cu_k = batch([1, 128, 333], [129, 128, 3000], shape, sinks=SINKS, seed=torch.seed() % 1000)
    codes, scales, meant = in_e4m3(k, v)
    for keys, more, exact in (((k, v), {}, expected(q, k, v, s, cu_q, cu_k, window)[0]),
                              (codes, {"scales": scales}, expected(q, *meant, s, cu_q, cu_k, window)[0])):
        k_pages, v_pages, lens, table = to_pages(*keys, cu_k, 64)
        names = ready_for_e4m3("paged_prefill", window, shape) if more else ready("paged_prefill", window, *shape)
        for name in built(names, 64, window):
            plan = PagedPrefill(LayerKind(*shape, window=window), cu_q, lens, table, page_size=64, device="cuda",
                                backend=name, lse="with_sink", kv_dtype=k_pages.dtype)
            run = plan.run
            plan.run = lambda *given, run=run, more=more, **out: run(*given, **more, **out)
            check_e4m3_output(plan, (q, k_pages, v_pages, s), exact)


@pytest.mark.parametrize("tokens", [8192, 8191])
def test_a_long_prompt_into_e4m3_rows(tokens):
    """Every program of the Gluon kernel takes many tiles, and without an LSE, as in a model."""
    q, k, v, s, cu_q, _ = batch([tokens], [tokens], SHAPES[0], seed=torch.seed() % 1000)
    for window in (None, 128):
        for name in {"triton", "gluon"} & set(ready("prefill", window, *SHAPES[0])):
            plan = Prefill(LayerKind(*SHAPES[0], window=window), cu_q, device="cuda", backend=name)
            wanted = norm_quantise(plan.run(q, k, v, s).flatten(1))
            for _ in range(3):
                out = empty_quantised(8192, 4096, "cuda")
                out.values.view(torch.uint8).fill_(0x7F)
                out.scale.fill_(torch.nan)
                plan.run(q, k, v, s, out=out)
                assert torch.equal(out.scale[:tokens], wanted.scale), name
                assert torch.equal(out.values[:tokens].view(torch.uint8), wanted.values.view(torch.uint8)), name


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 1500)), min_size=1, max_size=4),
    window=st.sampled_from([None, 128]), shape=st.sampled_from([SHAPES[0], SHAPES[3]]),
    sinks=st.lists(st.sampled_from(SINKS), min_size=1, max_size=4), seed=st.integers(0, 99),
)
def test_prefill_of_any_batch(lengths, window, shape, sinks, seed):
    q_lens, k_lens = [a for a, _ in lengths], [a + b for a, b in lengths]
    if sum(q_lens) == 0:
        return
    q, k, v, s, cu_q, cu_k = batch(q_lens, k_lens, shape, sinks=sinks, seed=seed)
    out, _, _ = expected(q, k, v, s, cu_q, cu_k, window)
    for name in built(ready("prefill", window, *shape), 64, window):
        close(name, prefill(q, k, v, s, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=window, backend=name), out,
              torch.bfloat16)


def test_a_sink_is_counted_once_when_the_keys_are_split():
    """Zero logits, values 1, sink = log(number of keys seen): every output is exactly one half."""
    n = 32768
    q = torch.zeros(1, 64, 64, device="cuda", dtype=torch.bfloat16)
    pages = torch.zeros(n // 64, 64, 8, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(n // 64, dtype=torch.int32)[None]
    where = {"kv_lens": torch.tensor([n], dtype=torch.int32), "page_table": table}
    for window, seen in ((None, n), (128, 128)):
        sinks = torch.full((64,), float(seen), device="cuda").log()
        for name in built(ready("paged_decode", window, 64, 8, 64), 64, window):
            out = paged_decode(q, pages, torch.ones_like(pages), sinks, window=window, backend=name, **where)
            torch.testing.assert_close(out.float(), torch.full_like(out.float(), 0.5), atol=4e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 128])
def test_raw_scores_of_1e5_give_no_nan(window):
    q, k, v, s, cu_q, cu_k = batch([500], [500], (64, 8, 64), sinks=[-torch.inf, 0.0, 60.0], spread=8e3)
    assert float((q[:, 0].float() @ k[:, 0].float().T).abs().max()) > 1e5
    out, _, _ = expected(q, k, v, s, cu_q, cu_k, window)
    for name in built(ready("prefill", window, 64, 8, 64), 64, window):
        got = prefill(q, k, v, s, cu_seqlens_q=cu_q, window=window, backend=name)
        assert torch.isfinite(got).all(), name
        assert float((got.double() - out).norm() / out.norm()) < 2e-2, name


def test_one_graph_serves_many_steps():
    """A decode captured once gives each later step's answer, for lengths that grow, with every backend."""
    shape = (64, 8, 64)
    for name in built(ready("paged_decode", None, *shape), 64, None):
        plan = PagedDecode(LayerKind(*shape), batch=3, max_kv_len=1024, page_size=64, device="cuda", backend=name)
        q_in, caches = torch.zeros(3, 64, 64, device="cuda", dtype=torch.bfloat16), None
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q_in)
        sinks = torch.randn(64, device="cuda")
        for seed, lens in enumerate(([5, 64, 700], [6, 65, 701], [900, 1, 1024])):
            q, k, v, _, cu_q, cu_k = batch([1] * 3, lens, shape, seed=seed)
            k_pages, v_pages, kv_lens, table = to_pages(k, v, cu_k, 64, seed)
            if caches is None:
                caches = [torch.zeros(64, *x.shape[1:], device="cuda", dtype=x.dtype) for x in (k_pages, v_pages)]
            for cache, pages in zip(caches, (k_pages, v_pages), strict=True):
                cache[: pages.shape[0]] = pages
            q_in.copy_(q)
            plan.step(kv_lens, table)
            if seed == 0:
                plan.run(q_in, *caches, sinks, out=out)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    plan.run(q_in, *caches, sinks, out=out)
            out.fill_(torch.nan)
            graph.replay()
            close(f"{name} step {seed}", out, expected(q, k, v, sinks, cu_q, cu_k, None)[0], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_formats(dtype):
    q, k, v, s, cu_q, cu_k = batch([200], [260], (8, 2, 64), dtype, sinks=SINKS)
    for window in (None, 50):
        out, _, _ = expected(q, k, v, s, cu_q, cu_k, window)
        for name in set(ready("prefill", window, 8, 2, 64, dtype)) & {"triton", "gluon"}:
            got = prefill(q, k, v, s, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=window, backend=name)
            close(name, got, out, dtype)
