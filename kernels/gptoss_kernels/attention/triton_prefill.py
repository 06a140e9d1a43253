"""Prefill with a sink in Triton: ragged or paged, full or sliding. The running maximum starts at the sink.

What: out = softmax([scale * q.k, sink]) with the sink's column dropped, for queries that are the last positions of
their sequence.

How: one program takes a tile of queries of one sequence, all query heads of one key head packed into its rows, and
walks the keys in blocks with the online softmax. Before the first block it holds one virtual key whose logit is the
sink and whose value is zero: m = sink, den = 1, acc = 0. Nothing else in the loop knows of the sink.

Why packed: a tile of 128 rows is then 16 queries x 8 heads. Key blocks are read once for all eight heads, and in a
sliding layer the keys a tile needs are window + 15 and not window + 127, which nearly halves the work. A sliding tile
starts at exactly its first key, takes whole blocks as far as every row's own key, and finishes in blocks of 16.

Pages in e4m3 are widened to the query's format as they are read, which is exact; the key's scale is folded into the
score's and the value's into the output, once per head. (Multiplying e4m3 by e4m3 would be faster and would round the
queries and the weights too.)

With `QUANTISE` the output leaves in e4m3 with a scale for each 128 columns of a token's heads, which is what a product
in FP8 takes: the rows of a query's heads are neighbours in a tile, so a group is in one program's registers.

What is lost: no warp specialisation by hand and no overlap of one tile's softmax with another's products beyond what
the compiler finds; the exponentials of a head_dim of 64 cost as much as its products, so that overlap is what the best
kernels win by.

`SINK_FIRST = False` leaves the sink out of the loop and folds it in at the end, which is where FlashInfer's templates
allow it. Both give the same output; only then is the LSE without the sink at hand without cancellation.
"""
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gptoss_kernels.quant.rounding import to_e4m3_groups

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE_FIELDS = tl.constexpr(8)
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _product(a, b, c, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b + c in fp32. The interpreter multiplies the bits of bf16 as integers, so there they are widened first."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _rows_of_keys(table, n, offs_n, sequence_base, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, limit):
    """Row numbers of the keys n + offs_n: in a ragged tensor, or through the page table of a sequence."""
    at = n + offs_n
    if PAGED:
        at = tl.minimum(at, limit - 1)
        page = tl.load(table + at // PAGE_SIZE)
        return page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
    return (sequence_base + at).to(tl.int64)


@triton.jit
def _block(
    q, acc, m, den, k, v, table, n, sequence_base, limit, position, window, scale_log2,
    stride_k, stride_v, offs_d,
    BLOCK: tl.constexpr, PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, MASK_HIGH: tl.constexpr,
    MASK_LOW: tl.constexpr, E4M3: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):
    """One step of the online softmax over keys n .. n + BLOCK. Scores and state are in units of log2."""
    offs_n = tl.arange(0, BLOCK)
    rows = _rows_of_keys(table, n, offs_n, sequence_base, PAGED, PAGE_SIZE, limit)
    if MASK_HIGH:
        inside = (n + offs_n < limit)[:, None]
        kb = tl.load(k + rows[:, None] * stride_k + offs_d[None, :], mask=inside, other=0.0)
        vb = tl.load(v + rows[:, None] * stride_v + offs_d[None, :], mask=inside, other=0.0)
    else:
        kb = tl.load(k + rows[:, None] * stride_k + offs_d[None, :])
        vb = tl.load(v + rows[:, None] * stride_v + offs_d[None, :])
    if E4M3:
        kb = kb.to(q.dtype)
        vb = vb.to(q.dtype)
    zero = tl.zeros([q.shape[0], BLOCK], tl.float32)
    s = _product(q, tl.trans(kb), zero, PRECISION, INTERPRET)                # [rows, BLOCK]
    key = (n + offs_n)[None, :]
    if MASK_HIGH:
        s = tl.where(key <= position[:, None], s, float("-inf"))
    if MASK_LOW:
        s = tl.where(key > position[:, None] - window, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
    safe = tl.where(new == float("-inf"), 0.0, new) if MASK_HIGH or MASK_LOW else new     # a row may have seen nothing
    p = tl.math.exp2(s * scale_log2 - safe[:, None])
    keep = tl.math.exp2(m - safe)
    den = den * keep + tl.sum(p, axis=1)
    acc = _product(p.to(vb.dtype), vb, acc * keep[:, None], PRECISION, INTERPRET)
    return acc, new, den


@triton.jit
def _quantise(
    rows, scales, first, q_begin, q_len, kv_head, stride_st, stride_sg,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """rows [BLOCK_M, HEAD_DIM] as e4m3. A group is 128 columns of a token, in rows that are neighbours; its scale is
    stored here."""
    GROUPS: tl.constexpr = GROUP * HEAD_DIM // 128                           # of one query
    IN_TILE: tl.constexpr = GROUP_ROWS * HEAD_DIM // 128                     # with those of heads that are not there
    COUNT: tl.constexpr = rows.shape[0] * HEAD_DIM // 128
    values, scale = to_e4m3_groups(tl.reshape(rows, [COUNT, 128]).to(tl.float32))
    at = tl.arange(0, COUNT)
    query = first + at // IN_TILE
    group = kv_head * GROUPS + at % IN_TILE
    tl.store(scales + (q_begin + query).to(tl.int64) * stride_st + group * stride_sg, scale,
             mask=(at % IN_TILE < GROUPS) & (query < q_len))
    return tl.reshape(values, [rows.shape[0], HEAD_DIM])


@triton.jit
def prefill_kernel(
    q, k, v, sinks, out, lse, tiles, page_table, key_scales, value_scales,
    window, scale_log2,
    stride_qt, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_ot, stride_oh, stride_table,
    out_scales, stride_st, stride_sg,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, WINDOWED: tl.constexpr,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, SINK_FIRST: tl.constexpr, LSE: tl.constexpr,
    E4M3: tl.constexpr, QUANTISE: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Grid (tiles, key heads). tiles: the rows of `tile_table`. With PAGED the keys are found through page_table.
    key_scales, value_scales: [Hkv] fp32, read with E4M3 pages alone. out: in q's dtype; with QUANTISE e4m3 of rounded
    rows, and out_scales [T, Hq * HEAD_DIM / 128] fp32 (None without)."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    kv_head = tl.program_id(1)
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    q_begin = tl.load(tile + 2)
    q_len = tl.load(tile + 3)
    k_begin = tl.load(tile + 4)
    k_len = tl.load(tile + 5)

    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP_ROWS                                        # row in the sequence's queries
    member = row % GROUP_ROWS                                                # query head within the group
    head = kv_head * GROUP + member
    real = (member < GROUP) & (query < q_len)
    position = k_len - q_len + query
    offs_d = tl.arange(0, HEAD_DIM)
    token = (q_begin + query).to(tl.int64)
    qb = tl.load(q + token[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :],
                 mask=real[:, None], other=0.0)
    sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * LOG2E

    if SINK_FIRST:
        m = sink
        den = tl.where(sink == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    k += kv_head * stride_kh
    v += kv_head * stride_vh
    if E4M3:
        scale_log2 = scale_log2 * tl.load(key_scales + kv_head)
    table = page_table + sequence.to(tl.int64) * stride_table
    least = k_len - q_len + first                                            # position of the tile's first query
    last = tl.minimum(first + BLOCK_M // GROUP_ROWS, q_len) - 1
    limit = tl.maximum(k_len - q_len + last + 1, 0)                          # keys that any row of the tile may see
    low = tl.maximum(least - window + 1, 0) if WINDOWED else 0
    whole = low + tl.maximum(least + 1 - low, 0) // BLOCK_N * BLOCK_N        # before it no row is masked causally
    for n in range(low, whole, BLOCK_N):
        acc, m, den = _block(qb, acc, m, den, k, v, table, n, k_begin, limit, position, window, scale_log2,
                           stride_k, stride_v, offs_d,
                           BLOCK_N, PAGED, PAGE_SIZE, False, WINDOWED, E4M3, PRECISION, INTERPRET)
    for n in range(whole, limit, TAIL_N):
        acc, m, den = _block(qb, acc, m, den, k, v, table, n, k_begin, limit, position, window, scale_log2,
                           stride_k, stride_v, offs_d,
                           TAIL_N, PAGED, PAGE_SIZE, True, WINDOWED, E4M3, PRECISION, INTERPRET)
    if E4M3:
        acc = acc * tl.load(value_scales + kv_head)

    total = den
    if not SINK_FIRST:                                                       # fold the sink in after the loop
        top = tl.maximum(m, sink)
        safe = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.math.exp2(m - safe)
        total = den * keep + tl.math.exp2(sink - safe)
        acc = acc * keep[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]                   # nothing seen: 0
    rows = acc
    if QUANTISE:
        rows = _quantise(acc.to(q.dtype.element_ty), out_scales, first, q_begin, q_len, kv_head, stride_st, stride_sg,
                         GROUP, GROUP_ROWS, HEAD_DIM)
    tl.store(out + token[:, None] * stride_ot + head[:, None] * stride_oh + offs_d[None, :],
             rows.to(out.dtype.element_ty), mask=real[:, None])
    if LSE:
        safe_m = tl.where(den > 0.0, m, 0.0)
        value = tl.where(den > 0.0, (safe_m + tl.math.log2(tl.where(den > 0.0, den, 1.0))) * LN2, float("-inf"))
        tl.store(lse + token * NUM_HEADS + head, value, mask=real)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def tile_table(cu_q: torch.Tensor, k_lens: torch.Tensor, k_begin: torch.Tensor, queries: int) -> torch.Tensor:
    """All a program must know of its tile, in one row that one memory access brings: int32 [tiles, 8] on the CPU.

    cu_q: [B + 1] offsets, k_lens, k_begin: [B], int64 on the CPU. queries: query rows in a tile. A row holds sequence,
    first query in it, the sequence's first row of q, its queries, its first row of k, its keys, and two unused. The
    tiles with the longest walk over keys come first, so that the short ones fill the machine at the end.
    """
    starts, k_lens, k_begin = cu_q.numpy(), k_lens.numpy(), k_begin.numpy()     # numpy: many steps over few numbers
    q_lens = np.diff(starts)
    per_sequence = -(-q_lens // queries)
    sequence = np.repeat(np.arange(len(q_lens)), per_sequence)
    before = np.cumsum(per_sequence) - per_sequence
    first = (np.arange(len(sequence)) - before[sequence]) * queries
    order = np.argsort(-((k_lens - q_lens)[sequence] + first), kind="stable")
    sequence, first = sequence[order], first[order]
    table = np.zeros((len(sequence), TILE_FIELDS.value), dtype=np.int32)
    fields = (sequence, first, starts[sequence], q_lens[sequence], k_begin[sequence], k_lens[sequence])
    table[:, : len(fields)] = np.stack(fields, axis=1)
    return torch.from_numpy(table)
