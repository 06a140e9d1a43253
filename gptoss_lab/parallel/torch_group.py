"""Exchanges over a process group of torch.distributed: NCCL on GPUs, gloo on CPUs, across processes and nodes alike.

torch wants equal parts in gather and reduce-scatter, so uneven ones travel padded to the longest; a rank without rows
takes part like any other. Every exchange waits at most as long as the process group was told to (see launch.py).
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gptoss_lab.parallel.groups import Group, Watch

# torch 2.13 renamed the two and warns about the old names, which are the only ones of 2.11.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchGroup(Group):
    """`Group` over a torch process group of which this process is a member."""

    def __init__(self, process_group: dist.ProcessGroup, watch: Watch | None = None) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group), watch)
        self.process_group = process_group

    def _all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.process_group)
        return total

    def _all_gather(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        longest = max(counts)
        out = x.new_empty(self.size * longest, *x.shape[1:])
        _gather(out, _padded(x, longest), group=self.process_group)
        if min(counts) == longest:
            return out
        return torch.cat([out[n * longest : n * longest + count] for n, count in enumerate(counts)])

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        longest = max(counts)
        if min(counts) < longest:
            x = torch.cat([_padded(part, longest) for part in x.split(counts)])
        out = x.new_empty(longest, *x.shape[1:])
        _scatter(out, x, group=self.process_group)
        return out[: counts[self.index]]

    def _all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int], what: str) -> torch.Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x, receive, send, group=self.process_group)
        return out

    def _send(self, x: torch.Tensor, to: int, what: str) -> Callable[[], None]:
        return dist.isend(x, group=self.process_group, group_dst=to).wait

    def _receive(self, out: torch.Tensor, source: int, what: str) -> None:
        dist.recv(out, group=self.process_group, group_src=source)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [n, ...] with zero rows behind it, [rows, ...]."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
