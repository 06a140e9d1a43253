"""Decode with a sink in Triton: one query per sequence over a paged cache, the keys split, then merged.

What: one token's query heads against up to `kv_lens[b]` cached keys.

How: a batch of 1 has only as many (sequence, key head) pairs as there are key heads, far fewer than the GPU has
multiprocessors; so the keys of a sequence are cut into splits that run as programs of their own. Each leaves its
running maximum m, denominator den and unnormalised output; a second kernel merges them. The sink enters exactly once:
the first split starts at m = sink, den = 1, the others at m = -inf, den = 0. (To return the LSE without the sink, all
start empty and the merge adds the sink, again once.)

Why this way: how many splits a sequence really uses is worked out on the GPU from its length, so the grid is fixed by
the capacity and the launch can be captured in a CUDA graph and replayed as lengths grow.

Pages in e4m3 are widened to the query's format as they are read, which is exact; the key's scale is folded into the
score's and the value's into a split's output, once per head.

Overlapping launches: lengths are asked for before the wait (`PagedDecode.step` writes them, and the page table after
them). With LATE (chosen for heads of 64) the kernel behind may start after the last key, so that weights it asks for
early do not come past the keys; without, at once.

What is lost: the merge is a second launch, about 2 us outside a graph; a split writes fp32 partial outputs.
"""
from __future__ import annotations

import triton
import triton.language as tl

from gptoss_kernels.attention.triton_prefill import LN2, LOG2E, _product
from gptoss_kernels.overlap import after_previous, let_next_start, load_early, wait_for_previous


@triton.jit
def _split_range(length, window, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """First key, end key and number of used splits; the used ones come first and none of them is empty."""
    low = 0
    if WINDOWED:
        low = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    blocks = (length - low + BLOCK_N - 1) // BLOCK_N
    per_split = tl.maximum((blocks + SPLITS - 1) // SPLITS, 1)
    used = tl.maximum((blocks + per_split - 1) // per_split, 1)              # an empty sequence still has its sink
    begin = low + split * per_split * BLOCK_N
    return begin, tl.minimum(begin + per_split * BLOCK_N, length), used


@triton.jit
def decode_kernel(
    q, k_pages, v_pages, sinks, out, lse, part_out, part_m, part_den, kv_lens, page_table, key_scales, value_scales,
    window, scale_log2,
    stride_qb, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_ob, stride_oh,
    stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SINK_FIRST: tl.constexpr, LSE: tl.constexpr, E4M3: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, LATE: tl.constexpr = False,
):
    """Grid (splits, key heads, batch). part_out [B, Hq, SPLITS, D] fp32, part_m and part_den [B, Hq, SPLITS] fp32.
    key_scales, value_scales: [Hkv] fp32, read with E4M3 pages alone."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = load_early(kv_lens + sequence, True)
    begin, end, used = _split_range(length, window, split, SPLITS, BLOCK_N, WINDOWED)
    if split >= used:
        return
    wait_for_previous()
    if not LATE:
        let_next_start()
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    real = row < GROUP
    offs_d = tl.arange(0, HEAD_DIM)
    offs_n = tl.arange(0, BLOCK_N)
    b = sequence.to(tl.int64)
    qb = tl.load(q + b * stride_qb + head[:, None] * stride_qh + offs_d[None, :], mask=real[:, None], other=0.0)
    sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
    m = tl.full([ROWS], float("-inf"), tl.float32)
    if SINK_FIRST:
        m = tl.where(split == 0, sink, m)                                    # once, in the first split
    den = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)

    table = page_table + b * stride_table
    k_pages += kv_head * stride_kh
    v_pages += kv_head * stride_vh
    if E4M3:
        scale_log2 = scale_log2 * tl.load(key_scales + kv_head)
    for n in range(begin, end, BLOCK_N):
        at = n + offs_n
        inside = at < end
        if PAGE_SIZE % BLOCK_N == 0:                                         # the block lies in one page
            page = tl.load(table + n // PAGE_SIZE).to(tl.int64)
            rows_k = page * stride_kp + (at % PAGE_SIZE) * stride_kt
            rows_v = page * stride_vp + (at % PAGE_SIZE) * stride_vt
        else:
            pages = tl.load(table + at // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            rows_k = pages * stride_kp + (at % PAGE_SIZE) * stride_kt
            rows_v = pages * stride_vp + (at % PAGE_SIZE) * stride_vt
        kb = tl.load(k_pages + rows_k[:, None] + offs_d[None, :], mask=inside[:, None], other=0.0)
        vb = tl.load(v_pages + rows_v[:, None] + offs_d[None, :], mask=inside[:, None], other=0.0)
        if E4M3:
            kb = kb.to(qb.dtype)
            vb = vb.to(qb.dtype)
        zero = tl.zeros([ROWS, BLOCK_N], tl.float32)
        s = _product(qb, tl.trans(kb), zero, PRECISION, INTERPRET) * scale_log2  # [ROWS, BLOCK_N]
        seen = inside
        if WINDOWED:
            seen = inside & (at >= length - window)
        s = tl.where(seen[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.math.exp2(s - safe[:, None])
        keep = tl.math.exp2(m - safe)
        den = den * keep + tl.sum(p, axis=1)
        acc = _product(p.to(vb.dtype), vb, acc * keep[:, None], PRECISION, INTERPRET)
        m = new
    if LATE:
        let_next_start()
    if E4M3:
        acc = acc * tl.load(value_scales + kv_head)

    if SPLITS == 1:
        total = den
        if not SINK_FIRST:
            top = tl.maximum(m, sink)
            safe = tl.where(top == float("-inf"), 0.0, top)
            total = den * tl.math.exp2(m - safe) + tl.math.exp2(sink - safe)
            acc = acc * tl.math.exp2(m - safe)[:, None]
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]               # nothing seen: 0
        tl.store(out + b * stride_ob + head[:, None] * stride_oh + offs_d[None, :], acc.to(out.dtype.element_ty),
                 mask=real[:, None])
        if LSE:
            value = tl.where(den > 0.0, (m + tl.math.log2(tl.where(den > 0.0, den, 1.0))) * LN2, float("-inf"))
            tl.store(lse + b * NUM_HEADS + head, value, mask=real)
    else:
        place = (b * NUM_HEADS + head) * SPLITS + split
        tl.store(part_m + place, m, mask=real)
        tl.store(part_den + place, den, mask=real)
        tl.store(part_out + place[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=real[:, None])


@triton.jit
def merge_kernel(
    sinks, out, lse, part_out, part_m, part_den, kv_lens, window, stride_ob, stride_oh,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr, WINDOWED: tl.constexpr, SINK_FIRST: tl.constexpr, LSE: tl.constexpr,
):
    """out = sum_i o_i 2^(m_i - M) / sum_i l_i 2^(m_i - M), M = max m_i, over the used splits. Grid (heads, batch)."""
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    _, _, used = _split_range(load_early(kv_lens + b, True), window, 0, SPLITS, BLOCK_N, WINDOWED)
    after_previous()
    split = tl.arange(0, SPLIT_ROWS)
    offs_d = tl.arange(0, HEAD_DIM)
    place = (b * NUM_HEADS + head) * SPLITS + split
    there = split < used
    m = tl.load(part_m + place, mask=there, other=float("-inf"))
    den = tl.load(part_den + place, mask=there, other=0.0)
    top = tl.max(m, axis=0)
    top_keys = tl.where(top == float("-inf"), 0.0, top)
    keys = tl.sum(den * tl.math.exp2(m - top_keys), axis=0)
    safe = top_keys
    total = keys
    if not SINK_FIRST:                                                       # once, here
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        all_top = tl.maximum(top, sink)
        safe = tl.where(all_top == float("-inf"), 0.0, all_top)
        total = keys * tl.math.exp2(top - safe) + tl.math.exp2(sink - safe)
    weight = tl.math.exp2(m - safe)
    o = tl.load(part_out + place[:, None] * HEAD_DIM + offs_d[None, :], mask=there[:, None], other=0.0)
    o = tl.sum(o * weight[:, None], axis=0)
    o = o / tl.where(total > 0.0, total, 1.0)                                # nothing seen: 0
    tl.store(out + b * stride_ob + head * stride_oh + offs_d, o.to(out.dtype.element_ty))
    if LSE:
        value = tl.where(keys > 0.0, (top_keys + tl.math.log2(tl.where(keys > 0.0, keys, 1.0))) * LN2, float("-inf"))
        tl.store(lse + b * NUM_HEADS + head, value)


def split_count(batch: int, num_kv_heads: int, blocks: int, programs: int) -> int:
    """Splits per sequence: as many as keep the grid within `programs`, so that one wave runs it; at least 1.

    blocks: key blocks of the longest sequence; a split has at least one. At most 128, which the merge reads at once.
    """
    return max(1, min(blocks, programs // max(1, batch * num_kv_heads), 128))
