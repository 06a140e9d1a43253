"""All-reduce over NVLink by plain loads and stores into the peers' memory, in two forms.

Every rank has its part [rows, H] in memory that the others can address, and a small array of flags likewise.

    one-shot    read every peer's part of a row, add, norm. One meeting, (p - 1) N bytes read by each rank.
    two-shot    row r belongs to rank r mod p: it adds that row alone and stores the sum to everyone; after a second
                meeting each rank norms all rows from its own memory. (p - 1) / p N read and as many written.

Meeting: program b of each rank meets program b of the others. Each stores the number of the meeting to its flag at
every peer, with release semantics at system scope, and spins on its own flags with acquire until all have the number.
Nobody waits for an answer to a store, so a meeting costs one crossing of the link. Numbers only grow and are counted on
the device, so a captured graph can be replayed. Nothing here needs multicast.

Why the buffers are safe. A rank that reaches call n + 1 has finished call n (one stream). So after the first meeting of
call n + 1 nobody reads the parts of call n: two part buffers in turn are enough. And a peer stores into our sums only
after our program of the same number has begun this call, when all readers of the last sums have finished.

The order of the sum is that of the ranks on every rank, so all have the same bits. Where the part was computed into
ordinary memory (COPY) each program first copies the rows that its namesakes at the peers will read, which saves a
launch: its own flag then says that they are there. NORM is left out where the next layer norms its input anyway.

What is lost: a row is a power of two of lanes, 30 % of them idle at 2880; and the flags take turns with nothing else,
so no copy overlaps the meeting.
"""
from __future__ import annotations

import triton
import triton.language as tl

from gptoss_kernels.quant.rounding import to_dtype

OPTIONS = {"num_warps": 8, "maxnreg": 128}
"""Of a launch. One program a multiprocessor is enough, so registers are free: they hold the peers' rows in flight."""


@triton.jit
def _meet(flags_ptr, number, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Wait until this program has met program `program_id(0)` of every rank. flags_ptr: [WORLD] int64 addresses.

    At each rank the flags are int32 [programs, WORLD]: the last meeting that each sender has come to.
    """
    program = tl.program_id(0)
    peers = tl.arange(0, LANES)
    real = peers < WORLD
    tl.debug_barrier()                      # all of this program's stores come before the flag
    there = tl.load(flags_ptr + peers, mask=real, other=0).to(tl.pointer_type(tl.int32)) + program * WORLD + RANK
    tl.atomic_xchg(there, number + tl.zeros((LANES,), tl.int32), mask=real, sem="release", scope="sys")
    here = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * WORLD + peers
    nothing = tl.zeros((LANES,), tl.int32)
    behind = 1
    while behind > 0:
        seen = tl.atomic_add(here, nothing, mask=real, sem="acquire", scope="sys")
        behind = tl.max(tl.where(real, number - seen, 0), axis=0)
    tl.debug_barrier()                      # no load of this program before the flags


@triton.jit
def _peer(addresses_ptr, rank, DTYPE: tl.constexpr):
    """The buffer of a rank as a pointer; buffers start at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _norm_store(x, weight_ptr, normed_ptr, at, h, live, eps, H: tl.constexpr):
    """RMSNorm of rounded rows x [R, BLOCK_H], stored. The weight is multiplied in fp32, before the one rounding."""
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, to_dtype(x * scale[:, None] * weight[None, :], normed_ptr.dtype.element_ty), mask=live)


@triton.jit
def _block(first, rows, h, ROWS: tl.constexpr, H: tl.constexpr):
    """Elements of ROWS rows from `first` on, [ROWS, BLOCK_H], and which of them are there."""
    row = first + tl.arange(0, ROWS)
    return row[:, None] * H + h[None, :], (row < rows)[:, None] & (h < H)[None, :]


@triton.jit
def _hand_in(parts_ptr, own_ptr, rows, h, RANK: tl.constexpr, EACH: tl.constexpr, H: tl.constexpr):
    """Copy this program's blocks of EACH rows from ordinary memory to where the peers read this rank's part."""
    mine = _peer(parts_ptr, RANK, own_ptr.dtype.element_ty)
    for first in range(tl.program_id(0) * EACH, rows, tl.num_programs(0) * EACH):
        for offset in tl.static_range(EACH):
            at, live = _block(first + offset, rows, h, 1, H)
            tl.store(mine + at, tl.load(own_ptr + at, mask=live, other=0.0), mask=live)


@triton.jit
def one_shot_kernel(parts_ptr, flags_ptr, meetings_ptr, own_ptr, residual_ptr, weight_ptr, sum_ptr, normed_ptr, rows,
                    eps, H: tl.constexpr, BLOCK_H: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
                    LANES: tl.constexpr, COPY: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr):
    """Programs take blocks of ROWS rows in turn, so many are on their way over the link at once.

    parts_ptr: [WORLD] int64 addresses of [rows, H]; meetings_ptr: int32 [programs]. own_ptr: this rank's part [rows, H]
    where it has still to be copied to its shared memory (COPY).
    """
    program = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    if COPY:
        _hand_in(parts_ptr, own_ptr, rows, h, RANK, ROWS, H)
    number = tl.load(meetings_ptr + program) + 1
    _meet(flags_ptr, number, RANK, WORLD, LANES)
    tl.store(meetings_ptr + program, number)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        at, live = _block(first, rows, h, ROWS, H)
        total = tl.zeros((ROWS, BLOCK_H), dtype=tl.float32)
        for rank in tl.static_range(WORLD):
            part = _peer(parts_ptr, rank, sum_ptr.dtype.element_ty)
            total += tl.load(part + at, mask=live, other=0.0).to(tl.float32)
        total += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        rounded = to_dtype(total, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=live)
        if NORM:
            _norm_store(rounded, weight_ptr, normed_ptr, at, h, live, eps, H)


@triton.jit
def two_shot_kernel(parts_ptr, sums_ptr, flags_ptr, meetings_ptr, own_ptr, residual_ptr, weight_ptr, normed_ptr, rows,
                    eps, H: tl.constexpr, BLOCK_H: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
                    LANES: tl.constexpr, COPY: tl.constexpr, NORM: tl.constexpr):
    """Programs take blocks of WORLD rows in turn; of each, this rank adds row RANK. sums_ptr: [WORLD] addresses.

    residual_ptr may be this rank's sum of the last call: a row of it is read by the one rank that then stores there.
    """
    program = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    if COPY:
        _hand_in(parts_ptr, own_ptr, rows, h, RANK, WORLD, H)
    number = tl.load(meetings_ptr + program) + 1
    _meet(flags_ptr, number, RANK, WORLD, LANES)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    for first in range(program * WORLD, rows, tl.num_programs(0) * WORLD):
        at, live = _block(first + RANK, rows, h, 1, H)
        total = tl.zeros((1, BLOCK_H), dtype=tl.float32)
        for rank in tl.static_range(WORLD):
            total += tl.load(_peer(parts_ptr, rank, dtype) + at, mask=live, other=0.0).to(tl.float32)
        total += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        rounded = to_dtype(total, dtype)
        for rank in tl.static_range(WORLD):
            tl.store(_peer(sums_ptr, rank, dtype) + at, rounded, mask=live)
    _meet(flags_ptr, number + 1, RANK, WORLD, LANES)
    tl.store(meetings_ptr + program, number + 1)
    if NORM:
        mine = _peer(sums_ptr, RANK, dtype)
        for first in range(program * WORLD, rows, tl.num_programs(0) * WORLD):
            for offset in tl.static_range(WORLD):
                at, live = _block(first + offset, rows, h, 1, H)
                _norm_store(tl.load(mine + at, mask=live, other=0.0), weight_ptr, normed_ptr, at, h, live, eps, H)
