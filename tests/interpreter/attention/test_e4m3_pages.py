"""Pages in e4m3 with a scale per key head: both paged kernels against fp64 on the very numbers that are stored."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Batch, assert_close, assert_lse, make_batch, to_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.attention import paged_decode, paged_prefill
from gptoss_kernels.reference.quant import E4M3_MAX

E4M3 = torch.float8_e4m3fn
SHAPES = [(8, 2, 16), (6, 3, 32), (4, 4, 16), (8, 1, 64)]


def stored(batch: Batch, seed: int = 0) -> tuple[Batch, Batch, tuple[torch.Tensor, torch.Tensor]]:
    """(codes in e4m3, the same batch with what they mean in fp64, scales): no two heads have the same scale."""
    g = torch.Generator().manual_seed(seed)
    heads = batch.k.shape[1]
    scales = tuple((x.abs().amax(dim=(0, 2)).float() / E4M3_MAX if len(x) else torch.ones(heads))
                   * (1 + torch.rand(heads, generator=g)) for x in (batch.k, batch.v))
    codes = [(x.float() / s[:, None]).to(E4M3) for x, s in zip((batch.k, batch.v), scales, strict=True)]
    meant = [c.double() * s.double()[:, None] for c, s in zip(codes, scales, strict=True)]
    return (dataclasses.replace(batch, k=codes[0], v=codes[1]), dataclasses.replace(batch, k=meant[0], v=meant[1]),
            scales)


def run(batch: Batch, scales, page_size: int, decode: bool, lse=None, seed: int = 0):
    k_pages, v_pages, lens, table = to_pages(batch, page_size, seed)
    where = {"kv_lens": lens, "page_table": table, "window": batch.window, "lse": lse, "backend": "triton",
             "scales": scales}
    if decode:
        return paged_decode(batch.q, k_pages, v_pages, batch.sinks, **where)
    return paged_prefill(batch.q, k_pages, v_pages, batch.sinks, cu_seqlens_q=batch.cu_q, **where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_over_e4m3_pages(shape, window, dtype):
    batch = make_batch([0, 1, 37], [3, 1, 150], *shape, dtype, window, sinks=[-torch.inf, -3.0, 2.0, 30.0])
    codes, meant, scales = stored(batch)
    out, with_sink, without = meant.expected()
    for lse, expected in (("with_sink", with_sink), ("without_sink", without)):
        actual, value = run(codes, scales, 16, False, lse)
        assert_close(actual, out, dtype)
        assert_lse(value, expected)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_over_e4m3_pages(monkeypatch, splits, window, dtype):
    """The value's scale enters before the splits are merged, or in the only one; the sink is scaled by nothing."""
    monkeypatch.setattr("gptoss_kernels.attention.triton_decode.split_count", lambda *_: splits)
    batch = make_batch([1] * 5, [1, 63, 64, 129, 400], 8, 2, 16, dtype, window, sinks=[-torch.inf, -3.0, 2.0, 60.0])
    codes, meant, scales = stored(batch)
    out, with_sink, without = meant.expected()
    for lse, expected in (("with_sink", with_sink), ("without_sink", without)):
        actual, value = run(codes, scales, 16, True, lse)
        assert_close(actual, out, dtype)
        assert_lse(value, expected)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 140)), shape=st.sampled_from(SHAPES),
    page_size=st.sampled_from([1, 3, 16, 64]), seed=st.integers(0, 1000),
)
def test_any_raggedness_and_page_order(lengths, window, shape, page_size, seed):
    for decode in (False, True):
        q_lens = [1 if decode else q for q, _ in lengths]
        batch = make_batch(q_lens, [q + past for q, past in lengths], *shape, torch.float32, window, seed)
        codes, meant, scales = stored(batch, seed)
        assert_close(run(codes, scales, page_size, decode, seed=seed), meant.expected()[0], torch.float32)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_a_scale_changes_its_own_heads_and_no_other(decode, which):
    """Doubling the value's scale of a head doubles its output; doubling the key's changes it in another way."""
    batch = make_batch([1, 1] if decode else [9, 4], [70, 33], 6, 3, 16, torch.float32, None)
    codes, _, scales = stored(batch)
    before, changed = run(codes, scales, 16, decode), [scale.clone() for scale in scales]
    changed[which][1] *= 2
    after = run(codes, tuple(changed), 16, decode)
    assert torch.equal(after[:, [0, 1, 4, 5]], before[:, [0, 1, 4, 5]])
    if which == 1:
        assert torch.equal(after[:, 2:4], 2 * before[:, 2:4])
    else:
        assert ((after - before)[:, 2:4].norm(dim=-1) > 1e-3 * before[:, 2:4].norm(dim=-1)).all()


def test_every_code_is_read_as_it_is_meant():
    """One key per sequence and no sink: the output is the value, here each finite e4m3 number, in every format."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(E4M3)                       # 254 numbers
    values = torch.cat([codes.view(torch.uint8), codes.view(torch.uint8)[:2]]).view(E4M3).view(16, 1, 1, 16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, scales = torch.zeros(16, 1, 16, dtype=dtype), (torch.ones(1), torch.full((1,), 0.5))
        out = paged_decode(q, values, values, None, kv_lens=torch.ones(16, dtype=torch.int32),
                           page_table=torch.arange(16, dtype=torch.int32)[:, None], backend="triton", scales=scales)
        assert torch.equal(out.float(), 0.5 * values[:, 0].float())
