"""Memory that every rank of a node can address, and the fused all-reduce in it.

`FusedAllReduce` is made once for a group and a largest number of rows. A call adds the parts of all ranks to the
residual and norms the result. The layer before may write its partial sum where `part` says, or anywhere: then the
kernel copies it on its way, which costs less than a launch for the rows of a decode step. Everything is at fixed
addresses, so calls can be captured in a CUDA graph; a graph must hold an even number of calls, because two part buffers
take turns and a replay begins where the capture began.

torch symmetric memory makes the buffers; multicast stays off (TORCH_SYMM_MEM_DISABLE_MULTICAST, set here before the
first use unless it was set), since the kernels need none and not every host allows it.
"""
from __future__ import annotations

import os

import torch
import torch.distributed as dist
import triton

from gptoss_kernels.comm.kernels import OPTIONS, one_shot_kernel, two_shot_kernel

PROGRAMS = 128          # at most: all of them must run at once, or a meeting would wait for one that has not begun
ONE_SHOT_ROWS = 8       # up to so many rows one crossing of the link is worth more than half of the bytes
FORMS = ("one_shot", "two_shot")


def choose_form(rows: int, world: int) -> str:
    """Between two ranks one-shot always: both forms move as much. Else for the few rows of a small decode batch."""
    return "one_shot" if world == 2 or rows <= ONE_SHOT_ROWS else "two_shot"


def rows_of_a_program(rows: int, world: int) -> int:
    """Rows that a program of the one-shot form has on their way at once: two where there are many to do."""
    return 2 if world == 2 and rows >= 4 * PROGRAMS else 1


def launch(
    form: str, *, parts: torch.Tensor, sums: torch.Tensor, flags: torch.Tensor, meetings: torch.Tensor,
    own_sum: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, normed: torch.Tensor | None, rank: int,
    world: int, eps: float = 1e-5, programs: int = PROGRAMS, part: torch.Tensor | None = None,
) -> None:
    """Launch one form on addresses.

    parts, sums, flags: [world] int64, addresses at each rank of its part [rows, H], its sum [rows, H] and its flags
    int32 [PROGRAMS, world]. meetings: [PROGRAMS] int32 of this rank. own_sum: this rank's sum. residual, normed:
    [rows, H]. weight: [H]; without it and normed there is no norm. part: [rows, H], this rank's part where it is not in
    the shared memory yet. All ranks must use the same form, rows and programs, but each its own way of handing in.
    """
    rows, h = residual.shape
    each = rows_of_a_program(rows, world) if form == "one_shot" else world
    grid = (max(1, min(programs, triton.cdiv(rows, each))),)
    shape = {"H": h, "BLOCK_H": triton.next_power_of_2(h), "RANK": rank, "WORLD": world,
             "LANES": max(2, triton.next_power_of_2(world)), "COPY": part is not None, "NORM": weight is not None,
             **OPTIONS}
    own = residual if part is None else part
    gain, out = (residual, residual) if weight is None else (weight, normed)      # not touched without a norm
    if form == "one_shot":
        one_shot_kernel[grid](parts, flags, meetings, own, residual, gain, own_sum, out, rows, eps, ROWS=each,
                              **shape)
    elif form == "two_shot":
        two_shot_kernel[grid](parts, sums, flags, meetings, own, residual, gain, out, rows, eps, **shape)
    else:
        raise ValueError(f"form is {form!r}; one of {', '.join(FORMS)} is expected")


class SharedMemory:
    """Zeroed memory of each rank of a node that all of them can address. Made by all ranks together.

    own: this rank's, as a tensor. of_ranks: everyone's, as tensors of this process: a copy into another rank's is made
    by the copy engines. addresses: [world] int64 on the device, for kernels. When the others have zeroed theirs is the
    caller's business.
    """

    def __init__(self, group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        device = torch.device("cuda", torch.cuda.current_device())
        self.own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
        self._handle = symmetric_memory.rendezvous(self.own, group)              # the peers' memory lives as long as it
        self.own.zero_()
        self.of_ranks = [self._handle.get_buffer(rank, shape, dtype) for rank in range(dist.get_world_size(group))]
        self.addresses = torch.tensor([x.data_ptr() for x in self.of_ranks], dtype=torch.int64, device=device)


class FusedAllReduce:
    """Sum over the ranks of a node, residual add and RMSNorm in one kernel.

    group: a process group of GPUs of one node. rows: the most that a call may have. hidden: H. dtype: of parts,
    residual and results. Made by all ranks together.
    """

    def __init__(
        self, group: dist.ProcessGroup, rows: int, hidden: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if not 0 < rows * hidden < 2**31:
            raise ValueError(f"{rows} rows of {hidden}; at least one element and fewer than 2^31 are expected")
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.rows, self.hidden, self.dtype = rows, hidden, dtype
        self._parts = [SharedMemory(group, (rows, hidden), dtype) for _ in range(2)]
        self._sum = SharedMemory(group, (rows, hidden), dtype)
        self._flags = SharedMemory(group, (PROGRAMS, self.world), torch.int32)
        self._meetings = torch.zeros(PROGRAMS, dtype=torch.int32, device=self._sum.own.device)
        self._turn = 0
        torch.cuda.synchronize()
        dist.barrier(group)                             # nobody raises a flag before all flags are zero

    def part(self, rows: int) -> torch.Tensor:
        """Where the partial sum of the next call goes, [rows, H]. ValueError for more rows than there is room for."""
        if not 0 < rows <= self.rows:
            raise ValueError(f"{rows} rows; at least 1 and at most {self.rows} are expected")
        return self._parts[self._turn].own[:rows]

    def take_turn(self) -> torch.Tensor:
        """Addresses of the parts of the call that begins, [world] int64; `part` is now of the next one. Every call
        that takes one begins with a meeting of all ranks: two buffers are then enough."""
        addresses, self._turn = self._parts[self._turn].addresses, 1 - self._turn
        return addresses

    def __call__(
        self, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-5, form: str | None = None,
        part: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual [rows, H] + the parts of all ranks -> (sum [rows, H], its RMSNorm [rows, H]).

        weight: [H] fp32 or the residual's dtype; None leaves the norm out. form: one of FORMS, None by the number of
        rows. part: [rows, H], this rank's part; None if it was written where `part` says. The sum of the two-shot form
        lies in shared memory and holds until this rank's next call, whose residual it may be.
        """
        rows = residual.shape[0]
        own = self.part(rows)
        for name, given in (("residual", residual), ("part", own if part is None else part)):
            if given.shape != own.shape or given.dtype != self.dtype or not given.is_contiguous():
                raise ValueError(f"{name} is {given.dtype} {list(given.shape)}; {self.dtype} {list(own.shape)}, "
                                 "contiguous, is expected")
        if part is not None and part.data_ptr() == own.data_ptr():
            part = None
        form = choose_form(rows, self.world) if form is None else form
        total = self._sum.own[:rows] if form == "two_shot" else torch.empty_like(residual)
        normed = None if weight is None else torch.empty_like(residual)
        launch(form, parts=self.take_turn(), sums=self._sum.addresses, flags=self._flags.addresses,
               meetings=self._meetings, own_sum=total, residual=residual, weight=weight, normed=normed, rank=self.rank,
               world=self.world, eps=eps, part=part)
        return total, normed
