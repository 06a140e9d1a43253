"""The end of a sharded layer for a long prompt: each rank sums its own rows and hands them out in e4m3.

The rows of the residual stream are cut between the ranks. One kernel reads the own rows of all parts over NVLink, adds
them to the own residual, norms the sum for the products that come next, quantises it and writes codes and scales into
every rank's memory. Of a prompt's [T, H] in bf16 a rank so receives 1 / p of each other part and the others' rows in
one byte a value: between two ranks three quarters of what the one-shot sum brings; and norm, quantisation and routing
are done once for a row, not on every rank.

    rank r      own rows of the stream and of its norm, contiguous, at multiples of ROW_STEP rows (`own_ranges`)
    everyone    all rows in e4m3 with their scales; which experts they go to (`hand_out`)

Why one buffer of each kind is safe. A rank's kernels run one after the other. `sum_rows_kernel` begins with a meeting,
so what a rank stores into a peer's memory comes after all that the peer ran before its call of the same number: its
readers of the last codes and scales have finished. `hand_out_kernel` begins with none: between two of its calls lies
a sum, whose meeting the peer reached after its last reader of ids and weights. Parts lie in the two buffers of
`FusedAllReduce` that take turns, under that class's rule: each call begins with a meeting, so after it nobody reads the
parts of the call before.

Why what was handed out is there. A kernel that ends with a meeting has met every program of every peer after that
one's last store. The sum after attention leaves it to `hand_out`, which follows before anybody reads the codes.

What is lost: the order of the meetings is the same on all ranks, so a call is as slow as the slowest; and scales are
stored by a few bytes each, since the products want them column by column.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from gptoss_kernels.comm.kernels import _meet, _peer
from gptoss_kernels.comm.reference import own_ranges
from gptoss_kernels.comm.symmetric import FusedAllReduce, SharedMemory
from gptoss_kernels.quant import Quantised
from gptoss_kernels.quant.norm_quant import columns_of, normalised
from gptoss_kernels.quant.rounding import to_dtype, to_e4m3_groups

PROGRAMS = 256          # at most: two on a multiprocessor, and all must run at once
TILE = 128              # rows are handed out in whole tiles of the products that read them
HAND_OUT_BLOCK = 1024   # numbers of a program of `hand_out_kernel`


@triton.jit
def _load_rows(parts_ptr, residual_ptr, row, first, rows, H: tl.constexpr, GROUPS: tl.constexpr, WORLD: tl.constexpr):
    """Own rows `row` of all parts, in the order of the ranks, and of the residual, as they are: a tuple, chunk by
    chunk of [ROWS, GROUPS, 128]. All is asked for before any of it is used."""
    loaded = ()
    for i in tl.static_range((H + GROUPS * 128 - 1) // (GROUPS * 128)):
        h = columns_of(i, GROUPS)[None, :, :]
        at, live = row[:, None, None] * H + h, (row < rows)[:, None, None] & (h < H)
        for rank in tl.static_range(WORLD):
            part = _peer(parts_ptr, rank, residual_ptr.dtype.element_ty)
            loaded = loaded + (tl.load(part + first * H + at, mask=live, other=0.0),)
        loaded = loaded + (tl.load(residual_ptr + at, mask=live, other=0.0),)
    return loaded


@triton.jit
def _sums(loaded, WORLD: tl.constexpr):
    """Of what `_load_rows` gave, chunk by chunk: added in fp32, rounded once."""
    chunks = ()
    for i in tl.static_range(len(loaded) // (WORLD + 1)):
        total = loaded[i * (WORLD + 1)].to(tl.float32)
        for n in tl.static_range(1, WORLD + 1):
            total += loaded[i * (WORLD + 1) + n].to(tl.float32)
        chunks = chunks + (to_dtype(total, loaded[0].dtype),)
    return chunks


@triton.jit
def _inverse_rms(chunks, H: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean square + EPS) of each row, [ROWS] fp32."""
    squares = chunks[0].to(tl.float32) * chunks[0].to(tl.float32)
    for i in tl.static_range(1, len(chunks)):
        squares += chunks[i].to(tl.float32) * chunks[i].to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, axis=2), axis=1) / H + EPS)


@triton.jit
def sum_rows_kernel(parts_ptr, values_ptr, scales_ptr, flags_ptr, meetings_ptr, residual_ptr, gain_ptr, sum_ptr, first,
                    rows, scale_stride, H: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
                    WORLD: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr, MEET: tl.constexpr,
                    EPS: tl.constexpr):
    """Programs take ROWS of this rank's `rows` rows in turn; of all rows these are the ones from `first` on.

    parts_ptr, values_ptr, scales_ptr, flags_ptr: [WORLD] int64 addresses at each rank of its part [T, H], of codes
    [T, H], of scales [ceil(H / 128), scale_stride] fp32 and of flags int32 [PROGRAMS, WORLD]. residual_ptr, sum_ptr:
    [rows, H]. gain_ptr: [H]. NORM: norm, quantise and hand out; else only the sum is made. MEET: at the end too, so
    that the others' rows are there.
    """
    program = tl.program_id(0)
    number = tl.load(meetings_ptr + program) + 1
    _meet(flags_ptr, number, RANK, WORLD, LANES)
    first = tl.multiple_of(first, 8)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        chunks = _sums(_load_rows(parts_ptr, residual_ptr, row, first, rows, H, GROUPS, WORLD), WORLD)
        inverse = _inverse_rms(chunks, H, EPS)[:, None, None]
        for i in tl.static_range(len(chunks)):
            h, group = columns_of(i, GROUPS), i * GROUPS + tl.arange(0, GROUPS)
            at, live = row[:, None, None] * H + h[None, :, :], (row < rows)[:, None, None] & (h < H)[None, :, :]
            tl.store(sum_ptr + at, chunks[i], mask=live)
            if NORM:
                q, scale = to_e4m3_groups(normalised(chunks[i], inverse, gain_ptr, h, H).to(tl.float32))
                scale_at = (first + row)[:, None] + group[None, :] * scale_stride
                for rank in tl.static_range(WORLD):
                    tl.store(_peer(values_ptr, rank, tl.float8e4nv) + first * H + at, q, mask=live)
                    tl.store(_peer(scales_ptr, rank, tl.float32) + scale_at, scale,
                             mask=(row < rows)[:, None] & (group * 128 < H)[None, :])
    if MEET:
        number += 1
        _meet(flags_ptr, number, RANK, WORLD, LANES)
    tl.store(meetings_ptr + program, number)


@triton.jit
def hand_out_kernel(ids_ptr, weights_ptr, to_ids_ptr, to_weights_ptr, flags_ptr, meetings_ptr, first, count,
                    RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """`count` ids (int32) and weights of own rows to everyone, to the places from `first` on; then a meeting.

    to_ids_ptr, to_weights_ptr: [WORLD] int64 addresses at each rank.
    """
    program = tl.program_id(0)
    first = tl.multiple_of(first, 8)
    for start in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < count, other=0)
        weights = tl.load(weights_ptr + at, mask=at < count, other=0.0)
        for rank in tl.static_range(WORLD):
            tl.store(_peer(to_ids_ptr, rank, tl.int32) + first + at, ids, mask=at < count)
            tl.store(_peer(to_weights_ptr, rank, weights_ptr.dtype.element_ty) + first + at, weights, mask=at < count)
    number = tl.load(meetings_ptr + program) + 1
    _meet(flags_ptr, number, RANK, WORLD, LANES)
    tl.store(meetings_ptr + program, number)


def sum_rows_config(rows: int, world: int) -> dict[str, int]:
    """Tile and launch options of `sum_rows_kernel` for the most own rows of any rank: between two ranks a program has
    two rows of all parts on their way (one and four were slower, 137 and 131 us in place of 126 at 8,192 rows), or one
    where not all programs would have more; two programs share a multiprocessor. The same on all ranks, since programs
    meet."""
    each = max(1, rows // PROGRAMS)
    return {"ROWS": min(max(1, 4 // world), 1 << each.bit_length() - 1), "GROUPS": 8, "num_warps": 8, "maxnreg": 128}


def launch_sum_rows(
    *, parts: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, flags: torch.Tensor, meetings: torch.Tensor,
    residual: torch.Tensor, weight: torch.Tensor | None, own_sum: torch.Tensor, tokens: int, scale_stride: int,
    rank: int, world: int, eps: float = 1e-5, meet: bool = True, programs: int = PROGRAMS,
) -> None:
    """Launch `sum_rows_kernel` on addresses. tokens: T, the rows of all ranks. residual, own_sum: [own rows, H].
    weight: [H] of the norm; without it only the sum is made. All ranks must use the same tokens, meet and programs."""
    own = own_ranges(tokens, world)
    config = sum_rows_config(max(map(len, own)), world)
    grid = min(programs, triton.cdiv(max(map(len, own)), config["ROWS"]))
    sum_rows_kernel[(grid,)](
        parts, values, scales, flags, meetings, residual, residual if weight is None else weight, own_sum,
        own[rank].start, len(own[rank]), scale_stride, H=residual.shape[1], RANK=rank, WORLD=world,
        LANES=max(2, triton.next_power_of_2(world)), NORM=weight is not None, MEET=meet, EPS=eps, **config)


def launch_hand_out(
    *, ids: torch.Tensor, weights: torch.Tensor, to_ids: torch.Tensor, to_weights: torch.Tensor, flags: torch.Tensor,
    meetings: torch.Tensor, tokens: int, rank: int, world: int, programs: int = PROGRAMS,
) -> None:
    """Launch `hand_out_kernel` on addresses. ids, weights: [own rows, k]."""
    own, top = own_ranges(tokens, world), ids.shape[1]
    grid = min(programs, triton.cdiv(max(map(len, own)) * top, HAND_OUT_BLOCK))
    hand_out_kernel[(grid,)](
        ids, weights, to_ids, to_weights, flags, meetings, own[rank].start * top, len(own[rank]) * top, RANK=rank,
        WORLD=world, LANES=max(2, triton.next_power_of_2(world)), BLOCK=HAND_OUT_BLOCK, num_warps=4)


class FusedOwnRows:
    """Sum of own rows, norm, quantisation and handing out between the ranks of a node.

    sums: whose parts, rows, hidden and dtype these are. group: its process group. top: experts of a token. Made by all
    ranks together; all call in the same order with the same number of rows.
    """

    def __init__(self, sums: FusedAllReduce, group: dist.ProcessGroup, top: int) -> None:
        self.sums, self.top = sums, top
        rows, hidden = -(-sums.rows // TILE) * TILE, sums.hidden
        self._values = SharedMemory(group, (rows, hidden), torch.uint8)          # codes: torch fills and moves bytes
        self._scales = SharedMemory(group, (-(-hidden // 128), rows), torch.float32)
        self._ids = SharedMemory(group, (rows, top), torch.int32)
        self._weights = SharedMemory(group, (rows, top), torch.float32)
        self._flags = SharedMemory(group, (PROGRAMS, sums.world), torch.int32)
        self._meetings = torch.zeros(PROGRAMS, dtype=torch.int32, device=self._values.own.device)
        torch.cuda.synchronize()
        dist.barrier(group)                              # nobody raises a flag before all flags are zero

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5,
        meet: bool = True,
    ) -> tuple[torch.Tensor, Quantised | None]:
        """Own rows of residual + the sum of all ranks' parts, and everyone's rows normed and in e4m3.

        part: [T, H]; written where `sums.part(T)` says, or copied there. residual: [own rows, H]. weight: [H] of the
        norm, None for the last sum: then nothing is handed out. meet: False if `hand_out` comes before the second
        result is read. That holds, in whole tiles of rows, until the next call.
        """
        tokens = part.shape[0]
        own, shared = own_ranges(tokens, self.sums.world)[self.sums.rank], self.sums.part(tokens)
        for name, given, shape in (("part", part, shared.shape), ("residual", residual, (len(own), self.sums.hidden))):
            if given.shape != shape or given.dtype != self.sums.dtype or not given.is_contiguous():
                raise ValueError(f"{name} is {given.dtype} {list(given.shape)}; {self.sums.dtype} {list(shape)}, "
                                 "contiguous, is expected")
        if part.data_ptr() != shared.data_ptr():
            shared.copy_(part)
        total = torch.empty_like(residual)
        launch_sum_rows(
            parts=self.sums.take_turn(), values=self._values.addresses, scales=self._scales.addresses,
            flags=self._flags.addresses, meetings=self._meetings, residual=residual, weight=weight, own_sum=total,
            tokens=tokens, scale_stride=self._scales.own.stride(0), rank=self.sums.rank, world=self.sums.world,
            eps=eps, meet=meet and weight is not None)
        return total, None if weight is None else self._quantised(tokens)

    def hand_out(
        self, ids: torch.Tensor, weights: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Own rows' experts [own rows, k], int32, and their fp32 weights -> those of all rows, [tokens, k] each.

        They hold until the next call, and before that there must be another sum.
        """
        if ids.dtype != torch.int32 or weights.dtype != torch.float32 or ids.shape[1] != self.top:
            raise ValueError(f"hand_out: ids are {ids.dtype} and weights {weights.dtype}, of {ids.shape[1]} experts; "
                             f"int32 and fp32 of {self.top} are expected")
        launch_hand_out(ids=ids, weights=weights, to_ids=self._ids.addresses, to_weights=self._weights.addresses,
                        flags=self._flags.addresses, meetings=self._meetings, tokens=tokens, rank=self.sums.rank,
                        world=self.sums.world)
        return self._ids.own[:tokens], self._weights.own[:tokens]

    def _quantised(self, tokens: int) -> Quantised:
        rows = -(-tokens // TILE) * TILE
        return Quantised(self._values.own.view(torch.float8_e4m3fn)[:rows], self._scales.own.t()[:rows])
