"""Routing in two or three launches: choose the experts, then place every (token, expert) row. No host synchronisation.

First launch: RMSNorm, router logits with bias, top-k (equal logits: lowest expert id), softmax over the selected logits
in registers, and how many rows each block of tokens sends to each expert. Second launch: a prefix sum over those counts
gives every row its place: sorted by expert, inside an expert in token order, every expert starting at a multiple of
`align`. No atomics, so the same input always gives the same order. A tile of 64 tokens per program would leave most of
the chip idle in decode: up to 128 tokens the logits have a launch of their own, spread over tokens and experts; then
each token's experts are chosen by its own program, or, up to 8 tokens, chosen and placed by a single one. Every program
of the second launch reads the counts of all blocks; beyond SCANNED_BLOCKS a launch in between sums them once for all.

Another routing scheme is another `_weigh`: DeepSeek-style "softmax over all, then top-k" is the `SOFTMAX_BEFORE` line.

The batch of a captured step may be larger than the requests in it: `num_tokens` on the device says how many of the rows
are real, and the others get no expert (id -1), no place and no count, so they cost no weight and change no buffer.

Precision: the normalised row is rounded to the activations' dtype, as the model does; logits accumulate in fp32. What
the reference rounds on the way is a switch: `logits_dtype` rounds the logits before the selection, `weight_dtype` the
weights after the softmax. Lost: an fp64 form; the reference module has it.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gptoss_kernels.moe.layout import max_tiles
from gptoss_kernels.overlap import OVERLAPPING, after_previous, load_early
from gptoss_kernels.quant.norm_quant import Quantised, empty_quantised, quantise_row
from gptoss_kernels.quant.rounding import operand, to_dtype

ONE_PROGRAM = 8         # up to here one program selects and places
FEW_TOKENS = 128        # up to here logits first and one program per token to select; above, one per 64 does both
SCANNED_BLOCKS = 128    # above so many blocks of tokens one launch sums the counts for all


@dataclass(frozen=True)
class Routing:
    """What routing decided, all on the device.

    ids: [T, k] int32, by descending logit; -1 in padding rows. weights: [T, k]. row_of: [T, k] int32, the row of the
    sorted buffer that holds this token for this expert (the inverse map for the combine), -1 where the expert is not
    local. counts: [E] int32, rows of each local expert. starts: [E] int32, its first row. tile_expert, tile_rows:
    [tiles] int32, local expert of each tile of `align` rows (-1: nothing to do) and its real rows. token_of: [tiles *
    align] int32, token of a row (-1: padding). row_expert: [tiles * align] int32, local expert of a row (-1: padding).
    rows: tiles * align. quantised: the normalised rows in token order, [T, H] e4m3, and their scales, as
    `norm_quantise` gives them, where `route` made them on the way.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    row_of: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    tile_expert: torch.Tensor
    tile_rows: torch.Tensor
    token_of: torch.Tensor
    row_expert: torch.Tensor
    align: int
    quantised: Quantised | None = None

    @property
    def rows(self) -> int:
        return self.row_expert.shape[0]


@triton.jit
def _inverse_rms(x_ptr, rows, valid, H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, EPS: tl.constexpr,
                 STAGES: tl.constexpr):
    """[BLOCK_T] fp32. STAGES - 1 blocks of columns are on their way at once; lanes are summed once, at the end."""
    squares = tl.zeros((BLOCK_T, BLOCK_H), dtype=tl.float32)
    for h0 in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        h = h0 + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + rows[:, None] * H + h[None, :], mask=valid[:, None] & (h < H)[None, :], other=0.0)
        x = x.to(tl.float32)
        squares += x * x
    return 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / H + EPS)


@triton.jit
def _logits(x_ptr, gain_ptr, router_ptr, rows, valid, experts, E, H: tl.constexpr, NORM: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, EPS: tl.constexpr):
    """[BLOCK_T, BLOCK_E] fp32: the normalised rows, rounded to x's dtype, times the router's rows."""
    scale = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if NORM:
        scale = _inverse_rms(x_ptr, rows, valid, H, BLOCK_T, 128, EPS, 4)
    acc = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + rows[:, None] * H + h[None, :], mask=valid[:, None] & (h < H)[None, :], other=0.0)
        w = tl.load(router_ptr + experts[None, :] * H + h[:, None], mask=(h < H)[:, None] & (experts < E)[None, :],
                    other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            x = to_dtype(x.to(tl.float32) * scale[:, None] * gain[None, :], x_ptr.dtype.element_ty)
        acc = tl.dot(operand(x), operand(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _select(logits, experts, E, TOP: tl.constexpr, TOP_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
            BLOCK_E: tl.constexpr):
    """Top-k of every row: values and ids [BLOCK_T, TOP_PAD] by descending logit, equal logits by ascending id."""
    slot = tl.arange(0, TOP_PAD)[None, :]
    left = tl.where((experts < E)[None, :], logits, -float("inf"))
    values = tl.full((BLOCK_T, TOP_PAD), -float("inf"), dtype=tl.float32)
    ids = tl.zeros((BLOCK_T, TOP_PAD), dtype=tl.int32)
    taken = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    for k in tl.static_range(TOP):
        top = tl.max(left, axis=1)
        hit = (left == top[:, None]) & (experts < E)[None, :] & (taken == 0)
        first = tl.min(tl.where(hit, experts[None, :], BLOCK_E), axis=1)
        values = tl.where(slot == k, top[:, None], values)
        ids = tl.where(slot == k, first[:, None], ids)
        mine = experts[None, :] == first[:, None]
        taken = taken | mine
        left = tl.where(mine, -float("inf"), left)
    return values, ids


@triton.jit
def _weigh(logits, values, experts, E, TOP: tl.constexpr, TOP_PAD: tl.constexpr, SOFTMAX_BEFORE: tl.constexpr):
    """Weights of the selected experts: softmax over them, or (SOFTMAX_BEFORE) over all and not renormalised."""
    slot = tl.arange(0, TOP_PAD)[None, :]
    top = tl.max(values, axis=1)
    share = tl.where(slot < TOP, tl.exp(values - top[:, None]), 0.0)
    total = tl.sum(share, axis=1)
    if SOFTMAX_BEFORE:
        total = tl.sum(tl.where((experts < E)[None, :], tl.exp(logits - top[:, None]), 0.0), axis=1)
    return share / total[:, None]


@triton.jit
def _without_padding(ids, weights, rows, real_ptr, MASKED: tl.constexpr):
    """Rows from the number at real_ptr on are padding: expert -1, weight 0."""
    if MASKED:
        real = (rows < tl.load(real_ptr))[:, None]
        ids = tl.where(real, ids, -1)
        weights = tl.where(real, weights, 0.0)
    return ids, weights


@triton.jit
def _choose_kernel(x_ptr, gain_ptr, router_ptr, bias_ptr, real_ptr, ids_ptr, weights_ptr, block_counts_ptr, T, E,
                   first_local, local_count, MASKED: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr,
                   TOP: tl.constexpr, TOP_PAD: tl.constexpr, SOFTMAX_BEFORE: tl.constexpr,
                   ROUND_LOGITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
                   EPS: tl.constexpr):
    """Many tokens, first launch: one program chooses for BLOCK_T tokens and counts its rows per expert."""
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    valid = rows < T
    experts = tl.arange(0, BLOCK_E)
    logits = _logits(x_ptr, gain_ptr, router_ptr, rows, valid, experts, E, H, NORM, BLOCK_T, BLOCK_E, BLOCK_H, EPS)
    logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)[None, :]
    if ROUND_LOGITS:
        logits = to_dtype(logits, tl.bfloat16).to(tl.float32)
    values, ids = _select(logits, experts, E, TOP, TOP_PAD, BLOCK_T, BLOCK_E)
    weights = _weigh(logits, values, experts, E, TOP, TOP_PAD, SOFTMAX_BEFORE)
    ids, weights = _without_padding(ids, weights, rows, real_ptr, MASKED)
    slot = tl.arange(0, TOP_PAD)[None, :]
    at = rows[:, None] * TOP + slot
    keep = valid[:, None] & (slot < TOP)
    tl.store(ids_ptr + at, ids, mask=keep)
    tl.store(weights_ptr + at, to_dtype(weights, weights_ptr.dtype.element_ty), mask=keep)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for k in tl.static_range(TOP):
        chosen = tl.sum(tl.where(slot == k, ids, 0), axis=1) - first_local
        counts += tl.sum(((chosen[:, None] == experts[None, :]) & valid[:, None]).to(tl.int32), axis=0)
    counts = tl.where(experts < local_count, counts, 0)
    tl.store(block_counts_ptr + tl.program_id(0) * BLOCK_E + experts, counts)


@triton.jit
def _logits_kernel(x_ptr, gain_ptr, router_ptr, bias_ptr, logits_ptr, q_ptr, scale_ptr, scale_row_stride,
                   scale_group_stride, T, E, H: tl.constexpr, NORM: tl.constexpr, QUANTISE: tl.constexpr,
                   BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, H_PAD: tl.constexpr,
                   EPS: tl.constexpr):
    """Up to 128 tokens, first launch: one program per BLOCK_T tokens and BLOCK_E experts writes fp32 logits with bias.
    So few rows would leave a tensor core mostly idle; what counts is how many programs read the router at once.

    QUANTISE: one program more per BLOCK_T tokens writes them normalised in e4m3, which saves a launch. Where a program
    takes one token and all columns at once (BLOCK_H is H_PAD) it asks for its part of the router before the wait.
    """
    if QUANTISE and tl.program_id(1) == tl.num_programs(1) - 1:
        after_previous()
        for i in tl.static_range(BLOCK_T):
            token = tl.program_id(0) * BLOCK_T + i
            if token < T:
                quantise_row(token.to(tl.int64), x_ptr, gain_ptr, q_ptr, scale_ptr, x_ptr, scale_row_stride,
                             scale_group_stride, H, 1, (H_PAD + 127) // 128, NORM, False, EPS)
    elif BLOCK_T == 1 and BLOCK_H == H_PAD:
        _write_logits_at_once(x_ptr, gain_ptr, router_ptr, bias_ptr, logits_ptr, E, H, NORM, BLOCK_E, H_PAD, EPS)
    else:
        after_previous()
        _write_logits(x_ptr, gain_ptr, router_ptr, bias_ptr, logits_ptr, T, E, H, NORM, BLOCK_T, BLOCK_E, BLOCK_H,
                      H_PAD, EPS)


@triton.jit
def _write_logits_at_once(x_ptr, gain_ptr, router_ptr, bias_ptr, logits_ptr, E, H: tl.constexpr, NORM: tl.constexpr,
                          BLOCK_E: tl.constexpr, H_PAD: tl.constexpr, EPS: tl.constexpr):
    """One token: all of its row, and all of the router's rows of BLOCK_E experts, in one turn."""
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, H_PAD)
    w = load_early(router_ptr + experts[:, None] * H + h[None, :], (experts < E)[:, None] & (h < H)[None, :])
    bias = load_early(bias_ptr + experts, experts < E).to(tl.float32)
    gain = tl.full((H_PAD,), 1.0, dtype=tl.float32)
    if NORM:
        gain = load_early(gain_ptr + h, h < H).to(tl.float32)
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * H + h, mask=h < H, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / H + EPS)
        x = to_dtype(wide * scale * gain, x_ptr.dtype.element_ty)
    logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1) + bias
    tl.store(logits_ptr + token * E + experts, logits, mask=experts < E)


@triton.jit
def _write_logits(x_ptr, gain_ptr, router_ptr, bias_ptr, logits_ptr, T, E, H: tl.constexpr, NORM: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, H_PAD: tl.constexpr,
                  EPS: tl.constexpr):
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    valid = rows < T
    scale = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if NORM:
        scale = _inverse_rms(x_ptr, rows, valid, H, BLOCK_T, H_PAD, EPS, 1)
    acc = tl.zeros((BLOCK_T, BLOCK_E, BLOCK_H), dtype=tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + rows[:, None] * H + h[None, :], mask=valid[:, None] & (h < H)[None, :], other=0.0)
        w = tl.load(router_ptr + experts[:, None] * H + h[None, :], mask=(experts < E)[:, None] & (h < H)[None, :],
                    other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            x = to_dtype(x.to(tl.float32) * scale[:, None] * gain[None, :], x_ptr.dtype.element_ty)
        acc += w.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
    logits = tl.sum(acc, axis=2) + tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)[None, :]
    tl.store(logits_ptr + rows[:, None] * E + experts[None, :], logits, mask=valid[:, None] & (experts < E)[None, :])


@triton.jit
def _choose_one_kernel(logits_ptr, real_ptr, ids_ptr, weights_ptr, block_counts_ptr, E, first_local, local_count,
                       MASKED: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr, SOFTMAX_BEFORE: tl.constexpr,
                       ROUND_LOGITS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Some tens of tokens, second launch: one program per token selects from its logits."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + row * E + experts, mask=experts < E, other=0.0)
    if ROUND_LOGITS:
        logits = to_dtype(logits, tl.bfloat16).to(tl.float32)
    logits = logits[None, :]
    values, ids = _select(logits, experts, E, TOP, TOP_PAD, 1, BLOCK_E)
    weights = _weigh(logits, values, experts, E, TOP, TOP_PAD, SOFTMAX_BEFORE)
    ids, weights = _without_padding(ids, weights, row + tl.zeros((1,), dtype=tl.int64), real_ptr, MASKED)
    slot = tl.arange(0, TOP_PAD)[None, :]
    tl.store(ids_ptr + row * TOP + slot, ids, mask=slot < TOP)
    tl.store(weights_ptr + row * TOP + slot, to_dtype(weights, weights_ptr.dtype.element_ty), mask=slot < TOP)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for k in tl.static_range(TOP):
        chosen = tl.sum(tl.sum(tl.where(slot == k, ids, 0), axis=1), axis=0) - first_local
        counts += (experts == chosen).to(tl.int32)
    tl.store(block_counts_ptr + row * BLOCK_E + experts, tl.where(experts < local_count, counts, 0))


@triton.jit
def _starts(counts, ALIGN: tl.constexpr):
    aligned = (counts + ALIGN - 1) // ALIGN * ALIGN
    return tl.cumsum(aligned, axis=0) - aligned


@triton.jit
def _describe(counts, starts, experts, counts_ptr, starts_ptr, tile_expert_ptr, tile_rows_ptr, row_expert_ptr,
              token_of_ptr, local_count, tiles, ALIGN: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """Per-expert and per-tile tables; the programs share the tiles among them."""
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + experts, counts, mask=experts < local_count)
        tl.store(starts_ptr + experts, starts, mask=experts < local_count)
    aligned = (counts + ALIGN - 1) // ALIGN * ALIGN
    row = tl.arange(0, ALIGN)
    for t0 in range(tl.program_id(0) * BLOCK_TILES, tiles, tl.num_programs(0) * BLOCK_TILES):
        tile = t0 + tl.arange(0, BLOCK_TILES)
        first = tile * ALIGN
        owner = (first[:, None] >= starts[None, :]) & (first[:, None] < (starts + aligned)[None, :])
        owned = tl.sum(owner.to(tl.int32), axis=1) > 0
        expert = tl.sum(tl.where(owner, experts[None, :], 0), axis=1)
        left = tl.sum(tl.where(owner, (starts + counts)[None, :] - first[:, None], 0), axis=1)
        real = tl.minimum(left, ALIGN)
        expert = tl.where(owned, expert, -1)
        tl.store(tile_expert_ptr + tile, expert, mask=tile < tiles)
        tl.store(tile_rows_ptr + tile, real, mask=tile < tiles)
        owner_of_row = tl.where(row[None, :] < real[:, None], expert[:, None], -1)
        at = first[:, None] + row[None, :]
        tl.store(row_expert_ptr + at, owner_of_row, mask=(tile < tiles)[:, None])
        tl.store(token_of_ptr + at, owner_of_row, mask=(tile < tiles)[:, None] & (owner_of_row < 0))


@triton.jit
def _place(ids, live, base, experts, token, slot_at, row_of_ptr, token_of_ptr, SLOTS: tl.constexpr,
           BLOCK_E: tl.constexpr, GATHER: tl.constexpr):
    """Row of each of SLOTS (token, expert) pairs: base[expert] + how many earlier pairs here chose the same expert.

    Returns the base for the pairs that follow. GATHER: through shared memory, for more than a few pairs; else by
    comparing each with all experts.
    """
    order = tl.arange(0, SLOTS)
    same = (ids[:, None] == ids[None, :]) & (order[None, :] < order[:, None]) & live[None, :]
    rank = tl.sum(same.to(tl.int32), axis=1)
    if GATHER:
        inside = tl.where(live, ids, 0)
        begin = tl.gather(base, inside, axis=0)
        base += tl.histogram(inside, BLOCK_E, mask=live)
    else:
        mine = ids[:, None] == experts[None, :]
        begin = tl.sum(tl.where(mine, base[None, :], 0), axis=1)
        base += tl.sum((mine & live[:, None]).to(tl.int32), axis=0)
    row = begin + rank
    tl.store(row_of_ptr + slot_at, tl.where(live, row, -1))
    tl.store(token_of_ptr + row, token, mask=live)
    return base


@triton.jit
def _count_kernel(ids_ptr, block_counts_ptr, T, first_local, local_count, TOP: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Choices made elsewhere: one program counts the rows per expert of BLOCK_T tokens."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for k in tl.static_range(TOP):
        chosen = tl.load(ids_ptr + rows * TOP + k, mask=rows < T, other=-1) - first_local
        counts += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    counts = tl.where(experts < local_count, counts, 0)
    tl.store(block_counts_ptr + tl.program_id(0) * BLOCK_E + experts, counts)


@triton.jit
def _place_kernel(ids_ptr, block_counts_ptr, row_of_ptr, token_of_ptr, counts_ptr, starts_ptr, tile_expert_ptr,
                  tile_rows_ptr, row_expert_ptr, T, blocks, first_local, local_count, tiles, TOP: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr,
                  BLOCK_TILES: tl.constexpr, SLOTS: tl.constexpr):
    """Many tokens, second launch: every program sums the counts of all blocks and of the blocks before its own."""
    after_previous()
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for b0 in range(0, blocks, CHUNK):
        b = b0 + tl.arange(0, CHUNK)
        part = tl.load(block_counts_ptr + b[:, None] * BLOCK_E + experts[None, :], mask=(b < blocks)[:, None], other=0)
        counts += tl.sum(part, axis=0)
        before += tl.sum(tl.where((b < tl.program_id(0))[:, None], part, 0), axis=0)
    _place_block(counts, before, ids_ptr, row_of_ptr, token_of_ptr, counts_ptr, starts_ptr, tile_expert_ptr,
                 tile_rows_ptr, row_expert_ptr, T, first_local, local_count, tiles, TOP, BLOCK_T, BLOCK_E, ALIGN,
                 BLOCK_TILES, SLOTS)


@triton.jit
def _scan_kernel(block_counts_ptr, blocks, BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Very many tokens, second of three launches: each block's counts become those of the blocks before it.

    The sums of all blocks go into one more row. One program scans EXPERTS columns.
    """
    after_previous()
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for b0 in range(0, blocks, CHUNK):
        b = b0 + tl.arange(0, CHUNK)
        at = block_counts_ptr + b[:, None] * BLOCK_E + experts[None, :]
        part = tl.load(at, mask=(b < blocks)[:, None], other=0)
        tl.store(at, total[None, :] + tl.cumsum(part, axis=0) - part, mask=(b < blocks)[:, None])
        total += tl.sum(part, axis=0)
    tl.store(block_counts_ptr + blocks * BLOCK_E + experts, total)


@triton.jit
def _place_scanned_kernel(ids_ptr, block_counts_ptr, row_of_ptr, token_of_ptr, counts_ptr, starts_ptr, tile_expert_ptr,
                          tile_rows_ptr, row_expert_ptr, T, blocks, first_local, local_count, tiles, TOP: tl.constexpr,
                          BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, BLOCK_TILES: tl.constexpr,
                          SLOTS: tl.constexpr):
    """Very many tokens, third launch: the sums are already there."""
    after_previous()
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(block_counts_ptr + blocks * BLOCK_E + experts)
    before = tl.load(block_counts_ptr + tl.program_id(0) * BLOCK_E + experts)
    _place_block(counts, before, ids_ptr, row_of_ptr, token_of_ptr, counts_ptr, starts_ptr, tile_expert_ptr,
                 tile_rows_ptr, row_expert_ptr, T, first_local, local_count, tiles, TOP, BLOCK_T, BLOCK_E, ALIGN,
                 BLOCK_TILES, SLOTS)


@triton.jit
def _place_block(counts, before, ids_ptr, row_of_ptr, token_of_ptr, counts_ptr, starts_ptr, tile_expert_ptr,
                 tile_rows_ptr, row_expert_ptr, T, first_local, local_count, tiles, TOP: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, BLOCK_TILES: tl.constexpr,
                 SLOTS: tl.constexpr):
    """Places of one block of tokens. counts, before: [BLOCK_E] rows per expert of all blocks, and of those before."""
    me = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    starts = _starts(counts, ALIGN)
    _describe(counts, starts, experts, counts_ptr, starts_ptr, tile_expert_ptr, tile_rows_ptr, row_expert_ptr,
              token_of_ptr, local_count, tiles, ALIGN, BLOCK_TILES)
    base = starts + before
    for s0 in range(0, BLOCK_T * TOP, SLOTS):
        slot = me * BLOCK_T * TOP + s0 + tl.arange(0, SLOTS)
        inside = (slot < T * TOP) & (slot < (me + 1) * BLOCK_T * TOP)
        ids = tl.load(ids_ptr + slot, mask=inside, other=-1) - first_local
        live = inside & (ids >= 0) & (ids < local_count)
        slot_at = tl.where(inside, slot, T * TOP)                       # one spare element swallows the overhang
        base = _place(ids, live, base, experts, slot // TOP, slot_at, row_of_ptr, token_of_ptr, SLOTS, BLOCK_E,
                      BLOCK_T > 1)


@triton.jit
def _choose_and_place_kernel(logits_ptr, real_ptr, ids_ptr, weights_ptr, row_of_ptr, token_of_ptr, counts_ptr,
                             starts_ptr, tile_expert_ptr, tile_rows_ptr, row_expert_ptr, T, E, first_local,
                             local_count, tiles, MASKED: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr,
                             SOFTMAX_BEFORE: tl.constexpr, ROUND_LOGITS: tl.constexpr, BLOCK_T: tl.constexpr,
                             BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, BLOCK_TILES: tl.constexpr,
                             SLOTS: tl.constexpr):
    """Few tokens, second launch, one program: select, weigh, count, place."""
    after_previous()
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    slot = tl.arange(0, TOP_PAD)[None, :]
    for t0 in range(0, T, BLOCK_T):
        rows = t0 + tl.arange(0, BLOCK_T)
        valid = rows < T
        logits = tl.load(logits_ptr + rows[:, None] * E + experts[None, :],
                         mask=valid[:, None] & (experts < E)[None, :], other=0.0)
        if ROUND_LOGITS:
            logits = to_dtype(logits, tl.bfloat16).to(tl.float32)
        values, ids = _select(logits, experts, E, TOP, TOP_PAD, BLOCK_T, BLOCK_E)
        weights = _weigh(logits, values, experts, E, TOP, TOP_PAD, SOFTMAX_BEFORE)
        ids, weights = _without_padding(ids, weights, rows, real_ptr, MASKED)
        at = rows[:, None] * TOP + slot
        keep = valid[:, None] & (slot < TOP)
        tl.store(ids_ptr + at, ids, mask=keep)
        tl.store(weights_ptr + at, to_dtype(weights, weights_ptr.dtype.element_ty), mask=keep)
        for k in tl.static_range(TOP):
            chosen = tl.sum(tl.where(slot == k, ids, 0), axis=1) - first_local
            counts += tl.sum(((chosen[:, None] == experts[None, :]) & valid[:, None]).to(tl.int32), axis=0)
    tl.debug_barrier()                                                  # the ids are read back below, by other threads
    counts = tl.where(experts < local_count, counts, 0)
    starts = _starts(counts, ALIGN)
    _describe(counts, starts, experts, counts_ptr, starts_ptr, tile_expert_ptr, tile_rows_ptr, row_expert_ptr,
              token_of_ptr, local_count, tiles, ALIGN, BLOCK_TILES)
    base = starts
    for s0 in range(0, T * TOP, SLOTS):
        s = s0 + tl.arange(0, SLOTS)
        inside = s < T * TOP
        ids = tl.load(ids_ptr + s, mask=inside, other=-1) - first_local
        live = inside & (ids >= 0) & (ids < local_count)
        base = _place(ids, live, base, experts, s // TOP, tl.where(inside, s, T * TOP), row_of_ptr, token_of_ptr,
                      SLOTS, BLOCK_E, False)


def logits_config(tokens: int, hidden: int) -> dict[str, int]:
    """Tile and launch options of `_logits_kernel`: some hundred programs, whatever the number of tokens."""
    padded = triton.next_power_of_2(hidden)
    block_t, block_e = (1, 2) if tokens == 1 else (1, 4) if tokens <= 16 else (2, 8) if tokens <= 64 else (4, 8)
    at_once = padded if block_t == 1 else min(1024 // block_t, padded)
    return {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_H": at_once, "H_PAD": padded, "num_warps": 4}


def choose_config(tokens: int) -> dict[str, int]:
    """Tile and launch options of `_choose_kernel`."""
    return {"BLOCK_T": 64, "BLOCK_H": 128 if tokens <= 8192 else 64, "num_warps": 8, "num_stages": 3}


def place_config(block_t: int, top: int) -> dict[str, int]:
    """Tile and launch options of `_place_kernel` for blocks of `block_t` tokens with `top` experts each. CHUNK: blocks
    that a program sums at once; `_place_scanned_kernel` takes the others."""
    return {"BLOCK_T": block_t, "SLOTS": triton.next_power_of_2(min(64, block_t * top)),
            "CHUNK": FEW_TOKENS if block_t == 1 else 32, "num_warps": 4}


def scan_config() -> dict[str, int]:
    """Experts of a program of `_scan_kernel`, blocks that it takes at once, and its warps."""
    return {"EXPERTS": 8, "CHUNK": 512, "num_warps": 4}


def route(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    *,
    experts_per_token: int = 4,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    softmax: str = "after",
    logits_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    align: int = 128,
    local_experts: tuple[int, int] | None = None,
    num_tokens: torch.Tensor | None = None,
    quantise: bool = False,
) -> Routing:
    """Choose experts for every token and lay out their rows.

    x: [T, H] bf16 or fp32, contiguous: the residual stream if `norm_weight` [H] is given (RMSNorm happens here), else
    already normalised. router_weight: [E, H] in x's dtype. router_bias: [E]. softmax: "after" the selection (gpt-oss)
    or "before" it (over all experts, not renormalised). logits_dtype, weight_dtype: fp32 or bf16, what the logits and
    the weights are rounded to. align: rows of a tile, a power of two. local_experts: [first, last) of the experts held
    here (expert parallelism); rows of others get no place. num_tokens: [1] int32 on x's device, how many of the T rows
    are real; the rest get id -1, weight 0 and no place (None: all are real). quantise: also the rows themselves,
    normalised, in e4m3 (`Routing.quantised`), where that costs no launch: up to FEW_TOKENS tokens, else None. What was
    launched last must not have written the router, its bias or the norm's weight: it may still run. Raises ValueError
    on shapes or settings that do not fit.
    """
    _check_route(x, router_weight, router_bias, norm_weight)
    _check_choice(router_weight.shape[0], experts_per_token, softmax, logits_dtype, weight_dtype, align)
    _check_num_tokens(num_tokens, x.device)
    t, h = x.shape
    e = router_weight.shape[0]
    first, last = _local_range(local_experts, e)
    local = (first, last - first)
    row_of, token_of, tables, tiles = _empty_tables(t, experts_per_token, last - first, align, x.device)
    router = _Router(x, router_weight, router_bias, norm_weight, norm_eps, experts_per_token, softmax == "before",
                     logits_dtype == torch.bfloat16, num_tokens)
    ids, weights = router.empty_choice(weight_dtype)
    quantised = empty_quantised(t, h, x.device) if quantise and t <= FEW_TOKENS else None
    shared = {"ALIGN": align, "BLOCK_TILES": 8}
    if t <= ONE_PROGRAM:
        few = triton.next_power_of_2(t)
        _choose_and_place_kernel[(1,)](
            router.logits(quantised), router.real, ids, weights, row_of, token_of, *tables, t, e, *local, tiles,
            **shared, **router.choice, BLOCK_T=few, SLOTS=max(16, triton.next_power_of_2(few * experts_per_token)),
            num_warps=1 if t <= 2 else 4, **OVERLAPPING)
        return _routing(ids, weights, row_of, token_of, tables, align, quantised)
    block_counts, block_t = router.choose(ids, weights, local, quantised)
    _place_blocks(ids, block_counts, (row_of, token_of, *tables), t, local, tiles, block_t, TOP=experts_per_token,
                  BLOCK_E=block_counts.shape[1], **shared)
    return _routing(ids, weights, row_of, token_of, tables, align, quantised)


def choose(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    *,
    experts_per_token: int = 4,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    softmax: str = "after",
    logits_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice alone, for rows that are placed elsewhere (`place`): ids [T, k] int32 and weights [T, k].

    Arguments and errors as of `route`. One launch, two up to FEW_TOKENS tokens.
    """
    _check_route(x, router_weight, router_bias, norm_weight)
    _check_choice(router_weight.shape[0], experts_per_token, softmax, logits_dtype, weight_dtype, 1)
    router = _Router(x, router_weight, router_bias, norm_weight, norm_eps, experts_per_token, softmax == "before",
                     logits_dtype == torch.bfloat16)
    ids, weights = router.empty_choice(weight_dtype)
    router.choose(ids, weights, (0, router_weight.shape[0]))
    return ids, weights


def router_logits(
    x: torch.Tensor, router_weight: torch.Tensor, router_bias: torch.Tensor, norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, Quantised]:
    """The logits alone, [T, E] fp32, of at most FEW_TOKENS tokens, and the (normalised) rows in e4m3; arguments as of
    `route`. One launch."""
    _check_route(x, router_weight, router_bias, norm_weight)
    if x.shape[0] > FEW_TOKENS:
        raise ValueError(f"router_logits: {x.shape[0]} tokens; at most {FEW_TOKENS} are taken")
    quantised = empty_quantised(*x.shape, x.device)
    return _Router(x, router_weight, router_bias, norm_weight, norm_eps, 1, False, False).logits(quantised), quantised


@dataclass(frozen=True)
class _Router:
    """The arguments of `route` that a choice needs, and the launches that make it."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_eps: float
    top: int
    softmax_before: bool
    round_logits: bool
    num_tokens: torch.Tensor | None = None

    @property
    def choice(self) -> dict[str, object]:
        """How experts are chosen from logits, as the kernels take it."""
        return {"TOP": self.top, "TOP_PAD": triton.next_power_of_2(self.top), "SOFTMAX_BEFORE": self.softmax_before,
                "ROUND_LOGITS": self.round_logits, "MASKED": self.num_tokens is not None, "BLOCK_E": self.block_e}

    @property
    def block_e(self) -> int:
        """Columns for the experts."""
        return max(16, triton.next_power_of_2(self.weight.shape[0]))

    @property
    def norm(self) -> dict[str, object]:
        """The norm before the product, as the kernels take it."""
        return {"H": self.x.shape[1], "NORM": self.norm_weight is not None, "EPS": self.norm_eps}

    @property
    def gain(self) -> torch.Tensor:
        """The norm's weight, or a pointer that is never read without NORM."""
        return self.bias if self.norm_weight is None else self.norm_weight

    @property
    def real(self) -> torch.Tensor:
        """The number of real rows, or a pointer that is never read without MASKED."""
        return self.bias if self.num_tokens is None else self.num_tokens

    def empty_choice(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for ids [T, k] int32 and weights [T, k] in dtype."""
        shape, device = (self.x.shape[0], self.top), self.x.device
        return torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, dtype=dtype, device=device)

    def logits(self, quantised: Quantised | None) -> torch.Tensor:
        """Few tokens, first launch: [T, E] fp32; the rows in e4m3 too where there is room for them."""
        (t, h), e = self.x.shape, self.weight.shape[0]
        logits = torch.empty(t, e, dtype=torch.float32, device=self.x.device)
        config, quantise = logits_config(t, h), quantised is not None
        q, scale = quantised or (logits, logits)                        # pointers that are not written without
        _logits_kernel[(triton.cdiv(t, config["BLOCK_T"]), triton.cdiv(e, config["BLOCK_E"]) + quantise)](
            self.x, self.gain, self.weight, self.bias, logits, q, scale, *scale.stride(), t, e, QUANTISE=quantise,
            **self.norm, **config, **OVERLAPPING)
        return logits

    def choose(
        self, ids: torch.Tensor, weights: torch.Tensor, local: tuple[int, int], quantised: Quantised | None = None
    ) -> tuple[torch.Tensor, int]:
        """Write ids and weights. Returns how many rows each block of tokens sends to each expert of `local`, (first,
        number), [blocks + 1, BLOCK_E] int32 with a row left for the sums of all; and the tokens of a block."""
        t, e, many = self.x.shape[0], self.weight.shape[0], choose_config(self.x.shape[0])
        block_t = 1 if t <= FEW_TOKENS else many["BLOCK_T"]
        blocks = triton.cdiv(t, block_t)
        counts = torch.empty(blocks + 1, self.block_e, dtype=torch.int32, device=self.x.device)
        if block_t == 1:
            _choose_one_kernel[(t,)](self.logits(quantised), self.real, ids, weights, counts, e, *local, **self.choice,
                                     num_warps=1, **OVERLAPPING)
        else:
            _choose_kernel[(blocks,)](self.x, self.gain, self.weight, self.bias, self.real, ids, weights, counts, t, e,
                                      *local, **self.norm, **self.choice, **many)
        return counts, block_t


def place(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, *, first_expert: int = 0, align: int = 128
) -> Routing:
    """Lay out the rows of choices that were made elsewhere. Two launches, three above 8,192 tokens.

    ids: [T, k] int32 or int64, global expert ids. weights: [T, k]. num_experts: experts held here, from
    first_expert on; rows of others get no place. align: as in `route`.
    """
    if ids.dim() != 2 or ids.shape[0] == 0 or weights.shape != ids.shape:
        raise ValueError(f"place: ids {list(ids.shape)} and weights {list(weights.shape)}; both [T, k], T > 0")
    t, top = ids.shape
    ids = ids.to(torch.int32).contiguous()
    row_of, token_of, tables, tiles = _empty_tables(t, top, num_experts, align, ids.device)
    block_t, block_e = 1 if t <= FEW_TOKENS else 64, max(16, triton.next_power_of_2(max(1, num_experts)))
    blocks = triton.cdiv(t, block_t)
    block_counts = torch.empty(blocks + 1, block_e, dtype=torch.int32, device=ids.device)
    _count_kernel[(blocks,)](ids, block_counts, t, first_expert, num_experts, TOP=top,
                             BLOCK_T=block_t, BLOCK_E=block_e, num_warps=4)
    _place_blocks(ids, block_counts, (row_of, token_of, *tables), t, (first_expert, num_experts), tiles, block_t,
                  TOP=top, BLOCK_E=block_e, ALIGN=align, BLOCK_TILES=8)
    return _routing(ids, weights.contiguous(), row_of, token_of, tables, align)


def _place_blocks(ids, block_counts, outputs, t: int, local: tuple[int, int], tiles: int, block_t: int,
                  **shared) -> None:
    """Launch what follows the counts of blocks of `block_t` tokens. block_counts: [blocks + 1, BLOCK_E] int32."""
    blocks = block_counts.shape[0] - 1
    config = {**place_config(block_t, shared["TOP"]), **shared, **OVERLAPPING}
    given = (ids, block_counts, *outputs, t, blocks, *local, tiles)
    if blocks <= SCANNED_BLOCKS:
        _place_kernel[(blocks,)](*given, **config)
        return
    del config["CHUNK"]
    scan = scan_config()
    _scan_kernel[(shared["BLOCK_E"] // scan["EXPERTS"],)](block_counts, blocks, BLOCK_E=shared["BLOCK_E"], **scan,
                                                          **OVERLAPPING)
    _place_scanned_kernel[(blocks,)](*given, **config)


def _check_num_tokens(num_tokens: torch.Tensor | None, device: torch.device) -> None:
    if num_tokens is not None and (num_tokens.shape != (1,) or num_tokens.dtype != torch.int32
                                   or num_tokens.device != device):
        raise ValueError(f"route: num_tokens is {num_tokens.dtype} {list(num_tokens.shape)} on {num_tokens.device}; "
                         f"int32 [1] on {device} is needed")


def _local_range(local_experts: tuple[int, int] | None, experts: int) -> tuple[int, int]:
    first, last = (0, experts) if local_experts is None else local_experts
    if not 0 <= first <= last <= experts:
        raise ValueError(f"route: local experts [{first}, {last}) of {experts}; a range within them is needed")
    return first, last


def _empty_tables(t: int, top: int, local: int, align: int, device: torch.device):
    """row_of (with one spare element, see _place_kernel), token_of, the tables of `_describe`, number of tiles."""
    tiles = max(1, max_tiles(t, top, max(1, local), align))
    i32 = {"dtype": torch.int32, "device": device}
    counts, starts = torch.empty(2, local, **i32).unbind(0)
    tile_expert, tile_rows = torch.empty(2, tiles, **i32).unbind(0)
    token_of, row_expert = torch.empty(2, tiles * align, **i32).unbind(0)
    return torch.empty(t * top + 1, **i32), token_of, (counts, starts, tile_expert, tile_rows, row_expert), tiles


def _routing(ids, weights, row_of, token_of, tables, align: int, quantised=None) -> Routing:
    return Routing(ids, weights, row_of[:-1].view(ids.shape), *tables[:4], token_of, tables[4], align, quantised)


def _check_route(x, router_weight, router_bias, norm_weight) -> None:
    if x.dim() != 2 or x.shape[0] == 0 or not x.is_contiguous():
        raise ValueError(f"route: x has shape {list(x.shape)}, contiguous {x.is_contiguous()}; [T, H] contiguous with "
                         "at least one row is needed")
    e, h = router_weight.shape
    if router_weight.dtype != x.dtype:
        raise ValueError(f"route: x is {x.dtype} and the router's weight {router_weight.dtype}; one dtype is needed")
    if h != x.shape[1] or router_bias.shape != (e,):
        raise ValueError(f"route: router weight {[e, h]} and bias {list(router_bias.shape)} for rows of {x.shape[1]}; "
                         f"[E, {x.shape[1]}] and [E] are needed")
    if norm_weight is not None and norm_weight.shape != (h,):
        raise ValueError(f"route: norm weight has shape {list(norm_weight.shape)}; [{h}] is needed")


def _check_choice(experts: int, top: int, softmax: str, logits_dtype, weight_dtype, align: int) -> None:
    if not 0 < top <= experts:
        raise ValueError(f"route: {top} experts per token of {experts}; between 1 and that")
    if softmax not in ("after", "before"):
        raise ValueError(f"route: softmax is {softmax!r}; 'after' or 'before' the selection")
    for name, dtype in (("logits_dtype", logits_dtype), ("weight_dtype", weight_dtype)):
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"route: {name} is {dtype}; torch.float32 or torch.bfloat16")
    if align < 1 or align & (align - 1):
        raise ValueError(f"route: rows are aligned to {align}; a power of two is needed")
