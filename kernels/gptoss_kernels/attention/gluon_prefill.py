"""Full causal prefill with a sink for Hopper, in Gluon: one warp loads, three warpgroups multiply and exponentiate.

What: the same operation as `triton_prefill` for ragged keys without a window, head_dim 64, 16-bit inputs; the output
in their format, or in e4m3 with a scale for each 128 columns, as a product in FP8 takes it.

How: a program stays on its multiprocessor and takes tile after tile. A tile is 192 rows, 64 for each of three
warpgroups: 24 queries x 8 query heads of one key head. A fourth role, one warp, fetches queries and blocks of 128 keys
and values with the tensor memory accelerator into a ring of buffers, and runs ahead over tile borders. A warpgroup
issues the scores of the next key block, then the weighted values of the last one, and while the tensor core works on
the latter it takes the maximum and the exponentials of the former. The weights go from one turn to the next packed two
to a register: as single 16-bit values the compiler spends an eighth of the loop on taking them apart. The keys are
walked from the diagonal down, so only the first block or two are masked. The sink stands where it does in
`triton_prefill`: m = sink, den = 1 before the loop.

Why this way: with head_dim 64 a score costs as much time in the exponential unit as in the tensor core, so speed is
how well the two overlap: within a warpgroup by the order above, and between the three by their running apart.
Tiles are dealt in a snake (0..131, 131..0, ...) from a list with the longest walks first, all tiles of one key head
before the next, so that the work evens out and the keys of the head stay in the L2.

What is lost: keys and values must have their heads side by side in memory (stride D), and values of the rows just
behind a sequence must be finite, since they are multiplied by zero.
"""
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gptoss_kernels.quant.rounding import to_e4m3_groups

WARPGROUPS = 3
ROWS = 64                       # rows of a warpgroup
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _work(turn, programs):
    """Index of this program's tile in its turn, dealt in a snake; it may lie past the last tile."""
    pid = gl.program_id(0)
    back = programs - 1 - pid
    return turn * programs + gl.where(turn % 2 == 0, pid, back)


@gluon.jit
def _key_blocks(first, q_len, k_len, QUERIES: gl.constexpr, BLOCK: gl.constexpr):
    """Number of key blocks that the last query of a tile reaches into."""
    last = gl.minimum(first + QUERIES, q_len) - 1
    return (k_len - q_len + last + BLOCK) // BLOCK


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, q_full, q_empty, full, empty, tiles, num_tiles, kv_heads, programs,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WGS: gl.constexpr, QUERIES: gl.constexpr, BLOCK: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """One warp: the queries of a tile, then keys and values from the diagonal down.

    Step i of a tile brings the keys of its i-th block and the values of the block before, which is what a turn of the
    consumers multiplies; so there is one barrier to wait for and one to arrive at.
    """
    total = num_tiles * kv_heads
    step = 0
    done = 0
    for turn in range((total + programs - 1) // programs):
        index = _work(turn, programs)
        if index < total:
            tile = tiles + (index % num_tiles) * 8
            head = index // num_tiles
            first = gl.load(tile + 1)
            q_begin = gl.load(tile + 2)
            q_len = gl.load(tile + 3)
            k_begin = gl.load(tile + 4)
            k_len = gl.load(tile + 5)
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, WGS * q_desc.block_type.nbytes)
            for w in gl.static_range(WGS):
                tma.async_copy_global_to_shared(
                    q_desc, [q_begin + first + w * (QUERIES // WGS), head * GROUP, 0], q_full, q_buf.index(w))
            blocks = _key_blocks(first, q_len, k_len, QUERIES, BLOCK)
            for i in range(blocks + 1):
                s = step % DEPTH
                mbarrier.wait(empty.index(s), ((step // DEPTH) & 1) ^ 1)
                arrival = full.index(s)
                both = (i > 0) & (i < blocks)
                mbarrier.expect(arrival, 2 * k_desc.block_type.nbytes, pred=both)
                mbarrier.expect(arrival, k_desc.block_type.nbytes, pred=both ^ True)
                row = k_begin + (blocks - 1 - i) * BLOCK
                tma.async_copy_global_to_shared(k_desc, [row, head * HEAD_DIM], arrival, k_buf.index(s),
                                                pred=i < blocks)
                tma.async_copy_global_to_shared(v_desc, [row + BLOCK, head * HEAD_DIM], arrival, v_buf.index(s),
                                                pred=i > 0)
                step += 1
            done += 1


@gluon.jit
def _exponentiate(s, m, den, column, last, scale_log2, MASK: gl.constexpr):
    """p = 2^(scale s - m'), and the state m', den' of the online softmax with the factor that old sums must take.

    last: [R, 1], the last column that a row sees. The mask is one opaque instruction pair per score, since the compiler
    would compute all comparisons early and then run out of predicate registers.
    """
    if MASK:
        s = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }", "=f,f,r,r",
            [s, column, last], dtype=gl.float32, is_pure=True, pack=1)
    new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    safe = gl.where(new == float("-inf"), 0.0, new) if MASK else new
    x = s * scale_log2 - safe.expand_dims(1)
    p = gl.exp2(x)
    keep = gl.exp2(m - safe)
    return p, new, den * keep + gl.sum(p, axis=1), keep


@gluon.jit
def _pack(e, DTYPE: gl.constexpr):
    """Neighbouring columns of e [R, N] fp32, rounded to 16 bits, as one int32 [R, N / 2]."""
    low, high = gl.split(e.reshape([e.shape[0], e.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32,
                                         is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32,
                                         is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, DTYPE: gl.constexpr, P: gl.constexpr):
    """The 16-bit numbers of `_pack`, [R, N], where the tensor core wants its left operand."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16),
                                          is_pure=True, pack=1)
    p = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p.to(DTYPE, bitcast=True), P, assert_trivial=True)


@gluon.jit
def _quantise(rows, scales, own, q_begin, q_len, kv_head, stride_st, stride_sg, GROUP: gl.constexpr):
    """rows [R, D] of the queries from own on as e4m3 [R, D] in the same layout, which keeps the addresses of the store
    as they are. A group is 128 columns of a token, two neighbouring rows; its scale is stored here."""
    GROUPS: gl.constexpr = GROUP * rows.shape[1] // 128                      # of one query
    COUNT: gl.constexpr = rows.shape[0] * rows.shape[1] // 128
    values, scale = to_e4m3_groups(rows.reshape([COUNT, 128]).to(gl.float32))
    at = gl.arange(0, COUNT, layout=scale.type.layout)
    query = own + at // GROUPS
    group = kv_head * GROUPS + at % GROUPS
    gl.store(scales + (q_begin + query).to(gl.int64) * stride_st + group * stride_sg, scale, mask=query < q_len)
    return gl.convert_layout(values.reshape([rows.shape[0], rows.shape[1]]), rows.type.layout, assert_trivial=True)


@gluon.jit
def _consume(
    W: gl.constexpr, q_buf, k_buf, v_buf, q_full, q_empty, full, empty, sinks, out, lse, tiles,
    num_tiles, kv_heads, programs, scale_log2, stride_ot, stride_oh, out_scales, stride_st, stride_sg,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WGS: gl.constexpr, QUERIES: gl.constexpr,
    BLOCK: gl.constexpr, DEPTH: gl.constexpr, SINK_FIRST: gl.constexpr, LSE: gl.constexpr, QUANTISE: gl.constexpr,
):
    """One warpgroup: rows W * 64 .. of every tile."""
    R: gl.constexpr = 64
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    total = num_tiles * kv_heads
    row = gl.arange(0, R, layout=gl.SliceLayout(1, S))
    row_o = gl.arange(0, R, layout=gl.SliceLayout(1, OUT))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S)).expand_dims(0)
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)).expand_dims(0)
    nothing = gl.zeros([R, BLOCK], gl.float32, S)
    step = 0
    done = 0
    for turn in range((total + programs - 1) // programs):
        index = _work(turn, programs)
        if index < total:
            tile = tiles + (index % num_tiles) * 8
            kv_head = index // num_tiles
            first = gl.load(tile + 1)
            q_begin = gl.load(tile + 2)
            q_len = gl.load(tile + 3)
            k_len = gl.load(tile + 5)
            own = first + W * (QUERIES // WGS)                               # first query of this warpgroup
            position = (k_len - q_len + own + row // GROUP).expand_dims(1)
            sink = gl.load(sinks + kv_head * GROUP + row % GROUP).to(gl.float32) * LOG2E
            if SINK_FIRST:
                m = sink
                den = gl.where(sink == float("-inf"), 0.0, 1.0)
            else:
                m = gl.full([R], float("-inf"), gl.float32, gl.SliceLayout(1, S))
                den = gl.zeros([R], gl.float32, gl.SliceLayout(1, S))
            blocks = _key_blocks(first, q_len, k_len, QUERIES, BLOCK)
            whole = gl.minimum((k_len - q_len + own + 1) // BLOCK, blocks - 1)   # blocks below it are not masked
            q = q_buf.index(W).reshape([R, HEAD_DIM])
            mbarrier.wait(q_full, done & 1)

            slot = step % DEPTH
            mbarrier.wait(full.index(slot), (step // DEPTH) & 1)
            s = warpgroup_mma(q, k_buf.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(slot), count=1)
            step += 1
            e, m, den, keep = _exponentiate(s, m, den, column, position - (blocks - 1) * BLOCK, scale_log2, True)
            p = _pack(e, q_buf.dtype)
            acc = gl.zeros([R, HEAD_DIM], gl.float32, OUT)
            for n in range(blocks - 2, whole - 1, -1):
                acc, p, m, den = _turn(acc, p, m, den, step, n, q, k_buf, v_buf, full, empty, nothing, column, position,
                                     scale_log2, BLOCK, DEPTH, OUT, P, True)
                step += 1
            for n in range(whole - 1, -1, -1):
                acc, p, m, den = _turn(acc, p, m, den, step, n, q, k_buf, v_buf, full, empty, nothing, column, position,
                                     scale_log2, BLOCK, DEPTH, OUT, P, False)
                step += 1
            mbarrier.arrive(q_empty, count=1)
            slot = step % DEPTH
            mbarrier.wait(full.index(slot), (step // DEPTH) & 1)
            acc = warpgroup_mma(_unpack(p, q_buf.dtype, P), v_buf.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(slot), count=1)
            step += 1
            done += 1

            whole_den = den
            if not SINK_FIRST:
                top = gl.maximum(m, sink)
                safe = gl.where(top == float("-inf"), 0.0, top)
                keep = gl.exp2(m - safe)
                whole_den = den * keep + gl.exp2(sink - safe)
                acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, OUT)).expand_dims(1)
            inverse = 1.0 / gl.where(whole_den > 0.0, whole_den, 1.0)
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT)).expand_dims(1)
            rows = acc
            if QUANTISE:
                rows = _quantise(acc.to(q_buf.dtype), out_scales, own, q_begin, q_len, kv_head, stride_st, stride_sg,
                                 GROUP)
            query = own + row_o // GROUP
            place = (q_begin + query).to(gl.int64) * stride_ot + (kv_head * GROUP + row_o % GROUP) * stride_oh
            gl.store(out + place.expand_dims(1) + offs_d, rows.to(out.dtype.element_ty),
                     mask=(query < q_len).expand_dims(1))
            if LSE:
                query_s = own + row // GROUP
                value = gl.where(den > 0.0, (m + gl.log2(gl.where(den > 0.0, den, 1.0))) * LN2, float("-inf"))
                at = (q_begin + query_s).to(gl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
                gl.store(lse + at, value, mask=query_s < q_len)


@gluon.jit
def _turn(
    acc, p, m, den, step, n, q, k_buf, v_buf, full, empty, nothing, column, position, scale_log2,
    BLOCK: gl.constexpr, DEPTH: gl.constexpr, OUT: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr,
):
    """Scores of key block n and the values of the block before it, in flight together; softmax under the latter."""
    slot = step % DEPTH
    mbarrier.wait(full.index(slot), (step // DEPTH) & 1)
    s = warpgroup_mma(q, k_buf.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    acc = warpgroup_mma(_unpack(p, k_buf.dtype, P), v_buf.index(slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    e, m, den, keep = _exponentiate(s, m, den, column, position - n * BLOCK, scale_log2, MASK)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, OUT)).expand_dims(1)
    return acc, _pack(e, k_buf.dtype), m, den


@gluon.jit
def gluon_prefill_kernel(
    q_desc, k_desc, v_desc, sinks, out, lse, tiles, num_tiles, kv_heads, programs, scale_log2, stride_ot, stride_oh,
    out_scales, stride_st, stride_sg, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK: gl.constexpr, DEPTH: gl.constexpr, SINK_FIRST: gl.constexpr, LSE: gl.constexpr, QUANTISE: gl.constexpr,
):
    """Grid (programs): one per multiprocessor. tiles: rows of `triton_prefill.tile_table` for 192 / GROUP queries.

    q_desc: [Tq, Hq, D] in boxes of [64 / GROUP, GROUP, D]; k_desc, v_desc: [Tk, Hkv * D] in boxes of [BLOCK, D].
    out: in q's dtype; with QUANTISE e4m3 of rounded rows, and out_scales [Tq, Hq * D / 128] fp32 (None without).
    """
    WGS: gl.constexpr = 3
    QUERIES: gl.constexpr = WGS * 64 // GROUP
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [WGS, 64 // GROUP, GROUP, HEAD_DIM], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [DEPTH, BLOCK, HEAD_DIM], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [DEPTH, BLOCK, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=WGS)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (0, q_buf, k_buf, v_buf, q_full, q_empty, full, empty, sinks, out, lse, tiles,
                    num_tiles, kv_heads, programs, scale_log2, stride_ot, stride_oh, out_scales, stride_st, stride_sg,
                    NUM_HEADS, GROUP, HEAD_DIM, WGS, QUERIES, BLOCK, DEPTH, SINK_FIRST, LSE, QUANTISE)),
        (_consume, (1, q_buf, k_buf, v_buf, q_full, q_empty, full, empty, sinks, out, lse, tiles,
                    num_tiles, kv_heads, programs, scale_log2, stride_ot, stride_oh, out_scales, stride_st, stride_sg,
                    NUM_HEADS, GROUP, HEAD_DIM, WGS, QUERIES, BLOCK, DEPTH, SINK_FIRST, LSE, QUANTISE)),
        (_consume, (2, q_buf, k_buf, v_buf, q_full, q_empty, full, empty, sinks, out, lse, tiles,
                    num_tiles, kv_heads, programs, scale_log2, stride_ot, stride_oh, out_scales, stride_st, stride_sg,
                    NUM_HEADS, GROUP, HEAD_DIM, WGS, QUERIES, BLOCK, DEPTH, SINK_FIRST, LSE, QUANTISE)),
        (_produce, (q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, q_full, q_empty, full, empty,
                    tiles, num_tiles, kv_heads, programs, GROUP, HEAD_DIM, WGS, QUERIES, BLOCK, DEPTH)),
    ], [4, 4, 1], [160, 160, 32])
