"""Attention with sinks against closed forms and against loops in numpy and float64."""
import math

import numpy as np
import pytest
import torch

from gptoss_kernels.reference.attention import sink_attention


def loops(q, k, v, sinks, cu_q, cu_k, window):
    """One query row and one head at a time; -inf sinks add nothing. Returns out and the log of the denominator."""
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    ratio = q.shape[1] // k.shape[1]
    for b in range(len(cu_q) - 1):
        queries, keys = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        for i in range(queries):
            at = keys - queries + i
            seen = [j for j in range(keys) if j <= at and (window is None or at - j < window)]
            for h in range(q.shape[1]):
                row, rows = cu_q[b] + i, [cu_k[b] + j for j in seen]
                z = np.array([q[row, h] @ k[r, h // ratio] for r in rows]) / math.sqrt(q.shape[2])
                total = np.exp(z).sum() + np.exp(sinks[h])
                lse[row, h] = np.log(total) if total > 0 else -np.inf
                if rows:
                    out[row, h] = (np.exp(z)[:, None] * np.stack([v[r, h // ratio] for r in rows])).sum(0) / total
    return out, lse


def example(cu_q, cu_k, heads=6, kv_heads=2, dim=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return normal(cu_q[-1], heads, dim), normal(cu_k[-1], kv_heads, dim), normal(cu_k[-1], kv_heads, dim), normal(heads)


RAGGED = {
    "prefill": ((0, 9, 10, 30), (0, 9, 10, 30)),
    "chunks": ((0, 4, 5, 17), (0, 20, 31, 43)),
    "decode": ((0, 1, 2, 3), (0, 1, 8, 30)),
    "an empty sequence": ((0, 5, 5, 8), (0, 5, 9, 15)),
}


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize("name", RAGGED)
def test_against_loops(name, window):
    cu_q, cu_k = RAGGED[name]
    q, k, v, sinks = example(cu_q, cu_k)
    out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=window)
    expected, expected_lse = loops(*(t.numpy() for t in (q, k, v, sinks)), cu_q, cu_k, window)
    assert out.dtype == lse.dtype == torch.float64
    np.testing.assert_allclose(out, expected, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-14)


@pytest.mark.parametrize("rows", [1, 3, 4, 64])
@pytest.mark.parametrize("window", [None, 5])
def test_block_of_queries_does_not_matter(rows, window):
    cu_q, cu_k = RAGGED["chunks"]
    q, k, v, sinks = example(cu_q, cu_k)
    given = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k), "window": window}
    whole, whole_lse = sink_attention(q, k, v, sinks, **given)
    out, lse = sink_attention(q, k, v, sinks, **given, query_block=rows)
    torch.testing.assert_close(out, whole, atol=1e-14, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-14, rtol=0)


def one_query(logits, values, sink):
    """A single query whose scaled logits are exactly `logits`: head_dim 1, scale 1, q = 1."""
    k = torch.tensor(logits, dtype=torch.float64).view(-1, 1, 1)
    v = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
    sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
    q, offsets = torch.ones(1, 1, 1, dtype=torch.float64), (0, len(logits))
    out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=(0, 1), cu_seqlens_k=offsets, scale=1.0)
    return out.item(), lse.item()


def test_sink_enters_once():
    """Logits 1..4, values 10..40, sink 2: 32.126854. Without the sink 34.926527, twice 29.742711."""
    logits, values = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]
    assert one_query(logits, values, 2.0)[0] == pytest.approx(32.126854, abs=5e-7)
    assert one_query(logits, values, None)[0] == pytest.approx(34.926527, abs=5e-7)
    assert one_query(logits, values, 2.0 + math.log(2))[0] == pytest.approx(29.742711, abs=5e-7)


@pytest.mark.parametrize("split", range(5))
def test_split_keys_merge_with_one_sink(split):
    """Two parts without sinks merged by their LSE, the sink added last; an empty part (0 or 4) is allowed."""
    logits, values = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]
    parts = [one_query(logits[:split], values[:split], None), one_query(logits[split:], values[split:], None)]
    total = np.logaddexp(np.logaddexp(parts[0][1], parts[1][1]), 2.0)
    merged = sum(out * math.exp(lse - total) for out, lse in parts)
    assert merged == pytest.approx(one_query(logits, values, 2.0)[0], abs=1e-13)


def test_sink_probability_is_what_is_missing():
    """With values of one, out = 1 - exp(sink - lse)."""
    cu = (0, 12)
    q, k, v, sinks = example(cu, cu)
    out, lse = sink_attention(q, k, torch.ones_like(v), sinks, cu_seqlens_q=cu, cu_seqlens_k=cu)
    torch.testing.assert_close(out[..., 0], 1 - torch.exp(sinks - lse), atol=1e-14, rtol=0)


@pytest.mark.parametrize("row, expected", [(126, 63.0), (127, 63.5), (128, 64.5), (300, 236.5)])
def test_window_of_128_includes_the_query(row, expected):
    """Equal logits and v[j] = j: query 127 averages 0..127, query 128 averages 1..128 (a window of 129 gives 64.0)."""
    count = 301
    v = torch.arange(count, dtype=torch.float64).view(-1, 1, 1)
    zero = torch.zeros(count, 1, 1, dtype=torch.float64)
    out, _ = sink_attention(
        zero, zero, v, torch.tensor([-torch.inf]), cu_seqlens_q=(0, count), cu_seqlens_k=(0, count), window=128,
    )
    assert out[row].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_no_sink_is_plain_softmax(window):
    cu = (0, 10)
    q, k, v, _ = example(cu, cu, heads=2, kv_heads=2)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    mask &= ~mask.tril(-window) if window else mask
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), attn_mask=mask)
    for sinks in (None, torch.full((2,), -torch.inf)):
        out, _ = sink_attention(q, k, v, sinks, cu_seqlens_q=cu, cu_seqlens_k=cu, window=window)
        torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-14, rtol=0)


@pytest.mark.parametrize("sink", [3.0, -math.inf])
def test_query_without_keys(sink):
    """Three queries, two keys: the first query comes before every key. Out 0 and LSE = sink, the others untouched."""
    q, k, v, _ = example((0, 3), (0, 2))
    sinks = torch.full((6,), sink, dtype=torch.float64)
    out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=(0, 3), cu_seqlens_k=(0, 2))
    assert (out[0] == 0).all() and (lse[0] == sink).all()
    rest, rest_lse = sink_attention(q[1:], k, v, sinks, cu_seqlens_q=(0, 2), cu_seqlens_k=(0, 2))
    assert torch.equal(out[1:], rest) and torch.equal(lse[1:], rest_lse)
    alone, _ = sink_attention(q[:1], k[:0], v[:0], sinks, cu_seqlens_q=(0, 1), cu_seqlens_k=(0, 0))
    assert (alone == 0).all()


@pytest.mark.parametrize("sink, size", [(1e4, 1.0), (-1e4, 1.0), (0.0, 300.0)])
def test_large_logits_and_sinks_stay_finite(sink, size):
    cu = (0, 20)
    q, k, v, _ = example(cu, cu, dtype=torch.float32)
    out, lse = sink_attention(size * q, k, v, torch.full((6,), sink), cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_bf16_is_computed_in_fp32():
    """bf16 inputs: the one rounding of the output away from the fp64 result of the same inputs."""
    cu = (0, 40)
    q, k, v, sinks = example(cu, cu, dtype=torch.bfloat16)
    out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=cu, cu_seqlens_k=cu)
    expected, _ = sink_attention(*(t.double() for t in (q, k, v, sinks)), cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    error = (out.double() - expected).abs() / expected.abs().clamp_min(2**-6)
    assert error.max() <= 2**-8


@pytest.mark.parametrize(
    "change, words",
    [
        ({"window": 0}, "window is 0"),
        ({"cu_seqlens_q": (0, 11)}, "offsets end at 11 and 12; q has 12 rows and k has 12"),
        ({"cu_seqlens_k": (0, 6, 12)}, "offsets end at"),
        ({"k": torch.zeros(12, 4, 16)}, "6 query heads are not a multiple of 4"),
    ],
)
def test_wrong_arguments(change, words):
    q, k, v, sinks = example((0, 12), (0, 12), dtype=torch.float32)
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "cu_seqlens_q": (0, 12), "cu_seqlens_k": (0, 12)} | change
    with pytest.raises(ValueError, match=words):
        sink_attention(**given)
