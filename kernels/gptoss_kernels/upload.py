"""Numbers that the host made, on their way to the device while nobody waits.

A copy from ordinary memory may hold the host until the stream has come to it. So the numbers go through pinned memory,
which torch does not use again before the copy has read it.
"""
from __future__ import annotations

import torch


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`; from the CPU to a GPU the copy is queued on the current stream, through pinned memory."""
    target = torch.device(device)
    if host.device.type != "cpu" or target.type != "cuda":
        return host.to(target)
    return host.pin_memory().to(target, non_blocking=True)
