"""The end of a sharded layer: the residual stream plus the sum of what all ranks computed, and the next layer's norm.

Between GPUs of one node this is one kernel over symmetric memory (gptoss_kernels.comm); elsewhere, and for more rows
than its buffers hold, an all-reduce of the group and an addition. Which of them takes how many rows is decided once,
when the object is made, the same on every rank; `reason` says why. The buffers are made once, so that calls can be
captured in a CUDA graph; a step must make an even number of calls, since two buffers take turns.

What is lost: the kernel's buffers, three times [rows, H]; and where the stream was summed by the two-shot form it lies
in that memory until the next call, so whoever wants to keep it must copy it.
"""
from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.distributed

from gptoss_lab.parallel.groups import Group

if TYPE_CHECKING:
    from gptoss_lab.parallel.own_rows import OwnRows


class ResidualSum:
    """residual + the sum of the parts over the ranks of `group`.

    rows: the most that the kernel's buffers hold; calls with more take the plain way. hidden: H. dtype, device: of
    the residual stream. calls: how many a step makes; an odd number takes the plain way. Made by all ranks of the
    group together.
    """

    def __init__(
        self, group: Group, rows: int, hidden: int, dtype: torch.dtype, device: torch.device | str, calls: int = 2
    ) -> None:
        self.group, self.rows = group, rows
        self.reason = fused_obstacle(group, dtype, torch.device(device))
        if self.reason is None and calls % 2:
            self.reason = f"the group's all-reduce: a step makes {calls} sums, and the kernel's two buffers take turns"
        self._fused, self._own_rows = None, None
        if self.reason is None:
            from gptoss_kernels.comm import FusedAllReduce

            self._fused = FusedAllReduce(group.process_group, rows, hidden, dtype)
            self.reason = f"one kernel up to the {rows} rows of its buffers; beyond, the group's all-reduce"

    def form(self, rows: int) -> str:
        """"one_shot", "two_shot" or "plain": how so many rows are summed.

        The kernel is the faster one for a prompt too, so only the buffers' size limits it: the sum that the next layer
        reads is written by the kernel that adds, where a library's all-reduce leaves two more passes over the rows.
        """
        if self._fused is None or rows > self.rows:
            return "plain"
        from gptoss_kernels.comm import choose_form

        return choose_form(rows, self.group.size)

    def room(self, rows: int) -> torch.Tensor | None:
        """Where the part of the next call, [rows, H], had best be written: from elsewhere the kernel copies it first.
        None where there is no such place."""
        return self._fused.part(rows) if rows and self.form(rows) != "plain" else None

    def own_rows(self, top: int) -> OwnRows:
        """Sums in which each rank keeps rows of its own, in the same buffers; a call of those is a call of a step as
        well. top: experts of a token. Made by all ranks together, at the first call."""
        if self._own_rows is None:
            from gptoss_lab.parallel.own_rows import OwnRows

            self._own_rows = OwnRows(self.group, self._fused, top)
        return self._own_rows

    def __call__(
        self, part: torch.Tensor, residual: torch.Tensor, what: str, norm_weight: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual [rows, H] + the sum over the ranks of part [rows, H]; its RMSNorm too where that costs no launch.

        what: the exchange's name. norm_weight: [H] if the norm is of use. The second result is None without it and in
        the plain form, which also rounds the sum of the parts before the residual is added; the kernel rounds once.
        """
        form = self.form(part.shape[0])
        if form == "plain" or not part.shape[0]:
            return residual + self.group.all_reduce(part, what), None
        others = self.group.size - 1
        received = others if form == "one_shot" else 2 * others / self.group.size
        self.group.traffic.add(what, received * part.nbytes)
        return self._fused(residual.contiguous(), norm_weight, eps, form, part)


def fused_obstacle(group: Group, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel over symmetric memory cannot sum for this group, in one line; None if it can, on all ranks."""
    if group.size == 1:
        return "nothing to sum: one rank"
    if device.type != "cuda":
        return f"the group's all-reduce: the kernel runs on GPUs of one node, and this is {device.type}"
    if not hasattr(group, "process_group"):
        return "the group's all-reduce: simulated ranks share no memory with peers"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the group's all-reduce: the kernel takes bf16 and fp32, not {dtype}"
    found: list[tuple[str, str | None]] = [("", None)] * group.size
    torch.distributed.all_gather_object(found, (socket.gethostname(), _local_obstacle()), group=group.process_group)
    if len({host for host, _ in found}) > 1:
        return f"the group's all-reduce: its {group.size} ranks are on several nodes"
    return next((reason for _, reason in found if reason is not None), None)


def _local_obstacle() -> str | None:
    """What this rank knows to be in the way."""
    if find_spec("triton") is None:
        return "the group's all-reduce: the kernel needs Triton"
    own = torch.cuda.current_device()
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"the group's all-reduce: GPU {own} cannot address the memory of GPU {peer}"
    return None
