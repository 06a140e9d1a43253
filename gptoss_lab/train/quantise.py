"""The stored form of a weight inside training: MXFP4 for experts, bf16 for all else, with the gradient passed through.

The forward sees exactly what the file will hold; the backward acts as if nothing had been rounded (straight-through
estimator), so the full-precision weight underneath goes on learning where to fall. The checkpoint's encoder looks at
its input on the host for errors, which would stop a GPU at every tensor, so its rule is written here once more without
that: scale 2^ceil(log2(absmax / 6)) for 32 values, nearest value, ties to the even code. Tests hold the two equal.
"""
from __future__ import annotations

import torch

from gptoss_lab.checkpoint.mxfp4 import GROUP
from gptoss_lab.checkpoint.powers import power_of_two_fp32

EXPERTS = ("gate_up", "down")
"""Parameters that are stored as MXFP4, by the last part of their names."""


def mxfp4_value(weight: torch.Tensor) -> torch.Tensor:
    """The MXFP4 value nearest to every element. weight: [..., K] fp32, K a multiple of 32; finite, not checked."""
    groups = weight.reshape(-1, GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    fraction, exponent = torch.frexp(largest)
    power = (exponent - 3 + (fraction > 0.75)).clamp(min=-126)
    unit = groups * power_of_two_fp32(-power)                                 # within -6..6
    size = unit.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))        # between codes: 0 0.5 1 1.5 2 3 4 6
    return (torch.round(unit / step) * step * power_of_two_fp32(power)).view(weight.shape)


def stored_value(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The value of a parameter after a trip through the file, in its own dtype. name: its last part decides."""
    if name.rpartition(".")[2] in EXPERTS:
        return mxfp4_value(weight)
    return weight.to(torch.bfloat16).to(weight.dtype)


def straight_through(name: str, weight: torch.Tensor) -> torch.Tensor:
    """`stored_value`, with the gradient of the identity."""
    with torch.no_grad():
        rounding = stored_value(name, weight) - weight
    return weight + rounding
