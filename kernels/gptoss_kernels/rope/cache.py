"""Split QKV, turn queries and keys, and write keys and values into their pages: one pass, one launch.

What: queries come out turned, [T, heads, D]; every token's key and value go to the row of the paged cache that `slots`
names (bf16, or e4m3 with a scale per head), and, for a prefill that attends to them directly, into contiguous tensors
as well. Beside e4m3 pages those get the rounded numbers too: what a token attends to must not depend on whether its
prompt came in one piece.

How: a program takes some tokens and one group of heads: query heads, or all key heads, or all value heads. Pairs are
half-split, so a head is read as its two halves of D / 2. cos and sin come from tables over all positions (fp32, 34 MB
for 131,072 positions of 32 pairs), the same numbers that the plain form uses: an angle computed here would have to
match an accurate fp32 cosine at 10^5 radians.

Why tables by position and not rows by token: nothing has to be prepared per step, so a captured step needs no launch
for it. What is lost: the tables' memory. A slot of -1 is not written; two tokens with one slot (padding rows of a
captured step, which all go to page 0) leave either's row.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.overlap import OVERLAPPING, after_previous
from gptoss_kernels.projection.backends import triton_obstacle
from gptoss_kernels.quant.rounding import round_to_e4m3, to_dtype, to_e4m3
from gptoss_kernels.reference.fused import rope_cache
from gptoss_kernels.registry import register


@triton.jit
def _store(pages, row, kept, group, d, first, second, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 GROUP: tl.constexpr):
    """Both halves [tokens, GROUP, D / 2] to rows `row` [tokens] of the pages; e4m3 ones hold them over their scale."""
    at = (row.to(tl.int64)[:, None, None] * KV_HEADS + group[None, :, None]) * HEAD_DIM + d[None, None, :]
    mask = kept[:, None, None] & (group < KV_HEADS)[None, :, None]
    tl.store(pages + at, first, mask=mask)
    tl.store(pages + at + HEAD_DIM // 2, second, mask=mask)


@triton.jit
def _over_scale(x, scale):
    """x / scale, clamped, as the number that e4m3 holds, in fp32: what a page will be read as. (Converting the e4m3
    bytes back gives wrong numbers where a thread has few of them: docs/tried.md.)"""
    return round_to_e4m3(tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0))


@triton.jit
def rope_cache_kernel(
    qkv, positions, cos, sin, q_out, k_pages, v_pages, slots, key_scales, value_scales, rows, keys, values, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    E4M3: tl.constexpr, CONTIGUOUS: tl.constexpr, PLACED: tl.constexpr,
):
    """Grid (tokens / BLOCK_T, query groups + 2): the last two groups are the keys and the values. Single tokens' angles
    and slots are asked for before the wait."""
    early: tl.constexpr = BLOCK_T == 1
    half: tl.constexpr = HEAD_DIM // 2
    query_groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    part = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < tokens
    is_query = part < query_groups
    group = tl.arange(0, GROUP)
    offset = tl.where(is_query, part * GROUP, HEADS + (part - query_groups) * KV_HEADS)
    limit = tl.where(is_query, HEADS - part * GROUP, KV_HEADS)              # heads of this group that are there
    d = tl.arange(0, half)
    if not early:
        after_previous()
    turns = live & (part <= query_groups)
    angle = tl.load(positions + t, mask=turns, other=0, volatile=early).to(tl.int64)[:, None] * half + d[None, :]
    c = tl.load(cos + angle, mask=turns[:, None], other=0.0, volatile=early)[:, None, :]
    s = tl.load(sin + angle, mask=turns[:, None], other=0.0, volatile=early)[:, None, :]
    slot = tl.load(slots + t, mask=live & (part >= query_groups), other=-1, volatile=early)
    if early:
        after_previous()
    at = t.to(tl.int64)[:, None, None] * width + ((offset + group) * HEAD_DIM)[None, :, None] + d[None, None, :]
    mask = live[:, None, None] & (group < limit)[None, :, None]
    first = tl.load(qkv + at, mask=mask, other=0.0).to(tl.float32)          # [BLOCK_T, GROUP, D / 2]
    second = tl.load(qkv + at + half, mask=mask, other=0.0).to(tl.float32)
    if part <= query_groups:
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    # What the model's dtype holds is what is stored, in e4m3 too: a cache must not depend on how it was filled.
    first = to_dtype(first, qkv.dtype.element_ty)
    second = to_dtype(second, qkv.dtype.element_ty)
    if is_query:
        to = (t.to(tl.int64)[:, None, None] * HEADS + (offset + group)[None, :, None]) * HEAD_DIM + d[None, None, :]
        tl.store(q_out + to, first, mask=mask)
        tl.store(q_out + to + half, second, mask=mask)
    else:
        is_key = part == query_groups
        pages = k_pages if is_key else v_pages
        stored_first = first
        stored_second = second
        if E4M3:
            scales = key_scales if is_key else value_scales
            scale = tl.load(scales + group, mask=group < KV_HEADS, other=1.0)[None, :, None]
            held_first = _over_scale(first, scale)
            held_second = _over_scale(second, scale)
            stored_first = to_e4m3(held_first)
            stored_second = to_e4m3(held_second)
            if CONTIGUOUS:
                first = to_dtype(held_first * scale, qkv.dtype.element_ty)
                second = to_dtype(held_second * scale, qkv.dtype.element_ty)
        _store(pages, slot, slot >= 0, group, d, stored_first, stored_second, KV_HEADS, HEAD_DIM, GROUP)
        if CONTIGUOUS:
            row = t
            if PLACED:
                row = tl.load(rows + t, mask=live, other=0)
            whole = keys if is_key else values
            _store(whole, row, live, group, d, first, second, KV_HEADS, HEAD_DIM, GROUP)


def rope_config(kv_heads: int, head_dim: int, tokens: int) -> dict[str, int]:
    """Tokens and heads of a program: about 2048 pairs for a prefill, one token for a decode."""
    group = triton.next_power_of_2(kv_heads)
    pairs = group * head_dim // 2
    block = 1 if tokens <= 128 else max(1, min(16, 2048 // pairs))
    return {"GROUP": group, "BLOCK_T": triton.next_power_of_2(block), "num_warps": 4 if block > 1 else 2}


@register("rope_cache", "triton", rank=100, obstacle=triton_obstacle)
def rope_cache_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    rows: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.fused.rope_cache`; everything contiguous, head_dim / 2 a power of two. Up to 128 tokens the kernel
    launched last must not be what wrote positions, slots, cos or sin: it may still run."""
    kv_heads, d = k_pages.shape[2:]
    _check(qkv, positions, cos, sin, k_pages, v_pages, slots, heads, scales, rows, keys, values)
    t = qkv.shape[0]
    q = torch.empty(t, heads, d, dtype=qkv.dtype, device=qkv.device)
    config = rope_config(kv_heads, d, t)
    groups = triton.cdiv(heads, config["GROUP"]) + 2
    key_scales, value_scales = (cos, cos) if scales is None else scales     # pointers that are never read without
    rope_cache_kernel[(triton.cdiv(t, config["BLOCK_T"]), groups)](
        qkv, positions, cos, sin, q, k_pages, v_pages, slots, key_scales, value_scales,
        slots if rows is None else rows, q if keys is None else keys, q if values is None else values, t,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=d, E4M3=scales is not None, CONTIGUOUS=keys is not None,
        PLACED=rows is not None, **config, **OVERLAPPING)
    return q


register("rope_cache", "reference", rank=1000)(rope_cache)


def _check(qkv, positions, cos, sin, k_pages, v_pages, slots, heads, scales, rows, keys, values) -> None:
    kv_heads, d = k_pages.shape[2:]
    t, width = qkv.shape
    if width != (heads + 2 * kv_heads) * d or not qkv.is_contiguous():
        raise ValueError(f"rope_cache: qkv has shape {list(qkv.shape)}, contiguous {qkv.is_contiguous()}; "
                         f"[T, {(heads + 2 * kv_heads) * d}] contiguous is needed")
    if d % 2 or d & (d - 1):
        raise ValueError(f"rope_cache: head_dim is {d}; a power of two is needed")
    for name, index in (("positions", positions), ("slots", slots), ("rows", rows)):
        if index is not None and (index.shape != (t,) or index.dtype != torch.int32 or not index.is_contiguous()):
            raise ValueError(f"rope_cache: {name} is {index.dtype} {list(index.shape)}; contiguous int32 [{t}] is "
                             "needed")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[1] != d // 2 or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(f"rope_cache: {name} is {table.dtype} {list(table.shape)}; contiguous fp32 [P, {d // 2}] "
                             "is needed")
    if k_pages.shape != v_pages.shape or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"rope_cache: pages {list(k_pages.shape)} and {list(v_pages.shape)}; equal shapes, contiguous")
    if (k_pages.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"rope_cache: pages are {k_pages.dtype} and scales {'given' if scales else 'missing'}; e4m3 "
                         "pages have scales and others none")
    if (keys is None) != (values is None) or (rows is not None and keys is None):
        raise ValueError("rope_cache: keys, values and rows belong together; one of them is missing")
