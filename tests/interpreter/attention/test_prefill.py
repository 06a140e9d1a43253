"""The Triton prefill kernel, ragged and paged, in the interpreter against fp64."""
from __future__ import annotations

import pytest
import torch
from attention_cases import Batch, assert_close, assert_lse, make_batch, to_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.attention import paged_prefill, prefill

SINKS = [-torch.inf, -30.0, 0.0, 1.5, 12.0, 60.0]
SHAPES = [(8, 1, 16), (6, 2, 32), (4, 4, 16), (5, 1, 16), (8, 1, 64)]      # heads, key heads, head_dim


def check_ragged(batch: Batch) -> None:
    """Output and both LSEs; the sink first in the loop, and folded in after it."""
    out, with_sink, without = batch.expected()
    for lse, expected in (("with_sink", with_sink), ("without_sink", without)):
        actual, actual_lse = prefill(batch.q, batch.k, batch.v, batch.sinks, cu_seqlens_q=batch.cu_q,
                                     cu_seqlens_k=batch.cu_k, window=batch.window, lse=lse, backend="triton")
        assert_close(actual, out, batch.q.dtype)
        assert_lse(actual_lse, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_windows_and_formats(shape, window, dtype):
    batch = make_batch([0, 1, 37], [3, 1, 150], *shape, dtype, window, sinks=SINKS)
    check_ragged(batch)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("window", [None, 128])
def test_lengths_around_the_window(length, window):
    check_ragged(make_batch([length], [length], 8, 1, 16, torch.float32, window))


def test_a_long_sequence_of_one_head():
    check_ragged(make_batch([3000], [3000], 1, 1, 16, torch.float32, 128))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 140)),
    shape=st.sampled_from(SHAPES[:4]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    sinks=st.lists(st.sampled_from(SINKS), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_raggedness_window_and_page_order(lengths, window, shape, page_size, sinks, seed):
    """(new queries, keys before them) of every sequence are drawn; the paged form must give the same."""
    q_lens, k_lens = [q for q, _ in lengths], [q + past for q, past in lengths]
    batch = make_batch(q_lens, k_lens, *shape, torch.float32, window, seed, sinks)
    if batch.cu_q[-1] == 0:
        return
    out, with_sink, _ = batch.expected()
    actual, lse = prefill(batch.q, batch.k, batch.v, batch.sinks, cu_seqlens_q=batch.cu_q, cu_seqlens_k=batch.cu_k,
                          window=window, lse="with_sink", backend="triton")
    assert_close(actual, out, torch.float32)
    assert_lse(lse, with_sink)
    k_pages, v_pages, lens, table = to_pages(batch, page_size, seed)
    paged = paged_prefill(batch.q, k_pages, v_pages, batch.sinks, cu_seqlens_q=batch.cu_q, kv_lens=lens,
                          page_table=table, window=window, backend="triton")
    assert_close(paged, out, torch.float32)


def test_queries_that_see_no_key_give_zero_and_their_sink():
    """Five queries, two keys: the first three queries stand before any key."""
    batch = make_batch([5], [2], 2, 1, 16, torch.float32, None, sinks=[1.5, -torch.inf])
    for lse in ("with_sink", "without_sink"):
        out, value = prefill(batch.q, batch.k, batch.v, batch.sinks, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 2], lse=lse,
                             backend="triton")
        assert (out[:3] == 0).all() and (out[3:] != 0).all()
        expected = [1.5, -torch.inf] if lse == "with_sink" else [-torch.inf, -torch.inf]
        torch.testing.assert_close(value[:3], torch.tensor([expected] * 3))


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 60.0])
def test_raw_scores_of_1e5_give_no_nan(sink):
    batch = make_batch([40], [40], 2, 1, 16, torch.float32, 9, sinks=[sink], spread=1e5)
    assert float((batch.q[:, 0] @ batch.k[:, 0].T).abs().max()) > 1e5
    out, _, _ = batch.expected()
    actual = prefill(batch.q, batch.k, batch.v, batch.sinks, cu_seqlens_q=[0, 40], window=9, backend="triton")
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.double(), out, atol=2e-3, rtol=2e-3)


def test_one_sink_changes_its_head_and_no_other():
    batch = make_batch([20], [20], 4, 2, 16, torch.float32, None)
    changed = batch.sinks.clone()
    changed[2] += 1.0
    before, after = (prefill(batch.q, batch.k, batch.v, s, cu_seqlens_q=batch.cu_q, backend="triton")
                     for s in (batch.sinks, changed))
    difference = (after - before).abs().amax(dim=(0, 2))
    assert difference[2] > 1e-2 and difference[[0, 1, 3]].max() == 0


@pytest.mark.parametrize(("key", "changes"), [(21, False), (22, True), (29, True)])
def test_a_key_counts_inside_the_window_only(key, changes):
    """Window 8: the last of 30 queries sees keys 22 to 29."""
    batch = make_batch([30], [30], 2, 1, 16, torch.float32, 8)
    where = {"cu_seqlens_q": [0, 1], "cu_seqlens_k": [0, 30], "window": 8, "backend": "triton"}
    before = prefill(batch.q[29:], batch.k, batch.v, batch.sinks, **where)
    batch.k[key] += 1.0
    batch.v[key] += 1.0
    after = prefill(batch.q[29:], batch.k, batch.v, batch.sinks, **where)
    assert bool((after != before).any()) == changes


def test_strided_inputs_and_a_given_output():
    """q, k and v may be slices of one fused projection, and `out` is written in place."""
    fused = torch.randn(19, 8 + 2 + 2, 16, generator=torch.Generator().manual_seed(1))
    q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    out = torch.full((19, 8, 16), torch.nan)
    result = prefill(q, k, v, None, cu_seqlens_q=[0, 19], backend="triton", out=out)
    assert result is out
    torch.testing.assert_close(out, prefill(q, k, v, None, cu_seqlens_q=[0, 19], backend="reference"))
