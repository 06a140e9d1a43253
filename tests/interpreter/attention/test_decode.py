"""The Triton decode kernels: any split of the keys counts the sink exactly once."""
from __future__ import annotations

import pytest
import torch
from attention_cases import assert_close, assert_lse, make_batch, to_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.attention import LayerKind, PagedDecode, paged_decode, prefill


def decode_with_splits(monkeypatch, splits, batch, page_size, lse):
    """Decode a batch whose plan is made to use this many splits."""
    monkeypatch.setattr("gptoss_kernels.attention.triton_decode.split_count", lambda *_: splits)
    k_pages, v_pages, lens, table = to_pages(batch, page_size)
    return paged_decode(batch.q, k_pages, v_pages, batch.sinks, kv_lens=lens, page_table=table, window=batch.window,
                        lse=lse, backend="triton")


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 70, 128])
@pytest.mark.parametrize("lse", ["with_sink", "without_sink"])
def test_every_number_of_splits(monkeypatch, splits, window, lse):
    batch = make_batch([1] * 5, [1, 63, 64, 129, 400], 8, 2, 16, torch.float32, window,
                       sinks=[-torch.inf, -3.0, 2.0, 60.0])
    out, with_sink, without = batch.expected()
    actual, value = decode_with_splits(monkeypatch, splits, batch, 16, lse)
    assert_close(actual, out, torch.float32)
    assert_lse(value, with_sink if lse == "with_sink" else without)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3), window=st.one_of(st.none(), st.integers(1, 200)),
    shape=st.sampled_from([(8, 1, 16), (3, 1, 16), (4, 4, 32), (32, 2, 16)]),
    page_size=st.sampled_from([1, 16, 48, 64]), splits=st.integers(1, 6), seed=st.integers(0, 1000),
)
def test_any_length_page_order_and_split(lengths, window, shape, page_size, splits, seed):
    batch = make_batch([1] * len(lengths), lengths, *shape, torch.float32, window, seed)
    with pytest.MonkeyPatch.context() as patch:
        actual = decode_with_splits(patch, splits, batch, page_size, None)
    assert_close(actual, batch.expected()[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    batch = make_batch([1, 1], [200, 77], 8, 1, 64, dtype, None)
    k_pages, v_pages, lens, table = to_pages(batch, 64)
    actual = paged_decode(batch.q, k_pages, v_pages, batch.sinks.bfloat16(), kv_lens=lens, page_table=table,
                          backend="triton")
    batch.sinks = batch.sinks.bfloat16().float()
    assert_close(actual, batch.expected()[0], dtype)


@pytest.mark.parametrize("split", [0, 1, 2, 3, 4])
def test_the_sink_is_counted_once_for_every_split_point(split):
    """Logits 1, 2, 3, 4, values 10, 20, 30, 40, sink 2: 32.126854; without the sink 34.93, counted twice 29.74.

    The two parts of the keys are merged by hand from the kernel's own outputs: the sink goes with the first part,
    which may be empty.
    """
    q = torch.ones(1, 1, 16)
    logits, values = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    k = (logits / 16).view(4, 1, 1).expand(4, 1, 16)
    v = values.view(4, 1, 1).expand(4, 1, 16)
    parts = []
    for a, b, sink in ((0, split, 2.0), (split, 4, -torch.inf)):
        parts.append(prefill(q, k[a:b].contiguous(), v[a:b].contiguous(), torch.tensor([sink]), cu_seqlens_q=[0, 1],
                             cu_seqlens_k=[0, b - a], scale=1.0, lse="with_sink", backend="triton"))
    lse = torch.stack([p[1] for p in parts])
    weight = torch.softmax(lse, dim=0)
    merged = sum(w * p[0][..., 0] for w, p in zip(weight, parts, strict=True))
    assert float(merged) == pytest.approx(32.126854, abs=1e-5)


def test_a_sequence_without_keys_gives_zero(monkeypatch):
    for splits in (1, 3):
        batch = make_batch([1, 1], [0, 40], 2, 1, 16, torch.float32, None, sinks=[1.5, -torch.inf])
        actual, lse = decode_with_splits(monkeypatch, splits, batch, 16, "with_sink")
        assert (actual[0] == 0).all() and torch.equal(lse[0], torch.tensor([1.5, -torch.inf]))
        assert_close(actual, batch.expected()[0], torch.float32)


def test_one_plan_follows_the_steps():
    """A plan made once gives each step's answer, for lengths that grow and pages that move."""
    plan = PagedDecode(LayerKind(4, 2, 16, torch.float32), batch=2, max_kv_len=160, page_size=16, device="cpu",
                       backend="triton")
    for seed, lengths in enumerate(([1, 90], [17, 91], [160, 3])):
        batch = make_batch([1, 1], lengths, 4, 2, 16, torch.float32, None, seed)
        k_pages, v_pages, lens, table = to_pages(batch, 16, seed)
        plan.step(lens, table)
        assert_close(plan.run(batch.q, k_pages, v_pages, batch.sinks), batch.expected()[0], torch.float32)


@pytest.mark.parametrize(("batch", "blocks", "programs", "expected"), [
    (1, 128, 528, 66), (16, 128, 528, 4), (64, 128, 528, 1), (128, 128, 528, 1), (1, 1, 528, 1), (1, 2000, 9999, 128),
])
def test_split_count(batch, blocks, programs, expected):
    from gptoss_kernels.attention.triton_decode import split_count

    assert split_count(batch, 8, blocks, programs) == expected
