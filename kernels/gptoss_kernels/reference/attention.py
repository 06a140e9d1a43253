"""Attention with a sink: softmax over the keys and one extra logit whose value vector is zero.

    w_j = exp(z_j - M) / (sum_j exp(z_j - M) + exp(s - M)),   out = sum_j w_j v_j,   M = max(max_j z_j, s)

with z = scale * q.k, masked causally (key <= query) and, in sliding layers, to the last `window` keys, the query's own
among them. The sink enters after scaling and masking and is never masked. Ragged: the sequences of a batch lie one
after the other, and the queries of a sequence are its last positions, so the same form serves prefill (as many queries
as keys), chunked prefill (fewer) and decode (one).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch


def sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    cu_seqlens_q: Sequence[int] | torch.Tensor,
    cu_seqlens_k: Sequence[int] | torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    query_block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with sinks over a ragged batch.

    q: [Tq, Hq, D]. k, v: [Tk, Hkv, D], Hq a multiple of Hkv (query head h reads key head h // (Hq / Hkv)).
    sinks: [Hq], natural-log units, -inf (or None) for no sink. cu_seqlens_q, cu_seqlens_k: [B + 1] row offsets of the
    sequences; the queries of sequence b are its last positions. window: number of keys a query sees, itself included.
    scale: default 1/sqrt(D). dtype: in which everything is computed, default fp32 (fp64 for fp64 queries).
    query_block: query rows at a time, default as many as keep the scores under 2^27 elements: it bounds memory only.
    Returns out [Tq, Hq, D] in q's dtype, and lse_with_sink [Tq, Hq] in `dtype`: log of the full denominator. A query
    that sees no key gives 0 and its sink's logit.
    """
    tq, hq, d = q.shape
    if hq % k.shape[1]:
        raise ValueError(f"sink_attention: {hq} query heads are not a multiple of {k.shape[1]} key heads")
    if window is not None and window < 1:
        raise ValueError(f"sink_attention: window is {window}; it counts keys and the query's own is one of them")
    starts_q, starts_k = [int(x) for x in cu_seqlens_q], [int(x) for x in cu_seqlens_k]
    if starts_q[-1] != tq or starts_k[-1] != k.shape[0] or len(starts_q) != len(starts_k):
        raise ValueError(f"sink_attention: offsets end at {starts_q[-1]} and {starts_k[-1]}; "
                         f"q has {tq} rows and k has {k.shape[0]}")
    scale = d**-0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32) if dtype is None else dtype
    sink = torch.full((hq,), -torch.inf, dtype=dtype, device=q.device) if sinks is None else sinks.to(dtype)
    out = torch.empty(tq, hq, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(tq, hq, dtype=dtype, device=q.device)
    for q0, q1, k0, k1 in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        rows = query_block or _rows_at_once(hq, k1 - k0, window)
        for a in range(q0, q1, rows):
            b = min(a + rows, q1)
            first = (k1 - k0) - (q1 - q0) + (a - q0)      # position of query row a in its sequence
            low = 0 if window is None else max(0, first - window + 1)
            high = max(low, first + (b - a))
            out[a:b], lse[a:b] = _block(
                q[a:b].to(dtype), k[k0 + low : k0 + high].to(dtype), v[k0 + low : k0 + high].to(dtype),
                sink, first - low, window, scale, q.dtype,
            )
    return out, lse


def _rows_at_once(heads: int, keys: int, window: int | None) -> int:
    """Query rows of one block: scores [heads, rows, keys] stay under 2^27 elements (512 MiB in fp32)."""
    if window is not None:
        return max(window, 256)                          # more would mostly be masked
    return max(16, 2**27 // (heads * max(keys, 1)))


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, first: int, window: int | None,
    scale: float, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of queries against the keys it may see; query row i stands at key index first + i."""
    tq, hq, d = q.shape
    tk, hkv, _ = k.shape
    grouped = q.view(tq, hkv, hq // hkv, d)                             # query head h -> (h // ratio, h % ratio)
    z = torch.einsum("qgrd,kgd->grqk", grouped, k).reshape(hq, tq, tk) * scale
    if tq > 1:                                                          # a lone query was given only what it sees
        at = first + torch.arange(tq, device=q.device)[:, None]
        key = torch.arange(tk, device=q.device)[None, :]
        hidden = key > at
        if window is not None:
            hidden = hidden | (key <= at - window)
        z = z.masked_fill(hidden, -torch.inf)
    top = torch.maximum(z.amax(dim=-1), sink[:, None]) if tk else sink[:, None].expand(hq, tq)
    safe = top.masked_fill(top == -torch.inf, 0.0)                      # no key and no sink: avoid -inf - (-inf)
    p = torch.exp(z - safe[..., None])
    total = p.sum(dim=-1) + torch.exp(sink[:, None] - safe)
    p = p / total.clamp_min(torch.finfo(z.dtype).tiny)[..., None]
    out = torch.einsum("grqk,kgd->qgrd", p.view(hkv, hq // hkv, tq, tk), v).reshape(tq, hq, d)
    return out.to(out_dtype), (safe + torch.log(total)).transpose(0, 1)


def log_sum_exp_without_sink(
    q: torch.Tensor, k: torch.Tensor, *, cu_seqlens_q: Sequence[int] | torch.Tensor,
    cu_seqlens_k: Sequence[int] | torch.Tensor, window: int | None = None, scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """log(sum_j exp(z_j)) over the keys alone, [Tq, Hq] in `dtype`; -inf for a query that sees no key.

    Arguments as in `sink_attention`. With it, log(exp(this) + exp(sink)) is that function's lse_with_sink.
    """
    return sink_attention(q, k, k, None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, window=window,
                          scale=scale, dtype=dtype)[1]


def gather_pages(
    pages: torch.Tensor, kv_lens: Sequence[int] | torch.Tensor, page_table: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """The ragged rows that a paged cache holds: ([sum of kv_lens, heads, D], their offsets [B + 1]).

    pages: [pages, page_size, heads, D]. kv_lens: [B] tokens of each sequence. page_table: [B, pages] int; token t of
    sequence b lies in row t % page_size of page page_table[b, t // page_size].
    """
    size = pages.shape[1]
    parts, offsets = [], [0]
    for b, length in enumerate(int(n) for n in kv_lens):
        used = page_table[b, : -(-length // size)].to(pages.device, torch.int64)
        parts.append(pages[used].reshape(-1, *pages.shape[2:])[:length])
        offsets.append(offsets[-1] + length)
    return torch.cat(parts) if parts else pages.new_empty((0, *pages.shape[2:])), offsets
