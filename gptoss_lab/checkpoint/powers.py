"""Exact powers of two, built from bits.

`torch.ldexp` and `2.0 ** tensor` go through a floating-point `pow`, in fp32 for integer exponents, which neither
promises the last bit nor reaches subnormals everywhere. A power of two is only an exponent field, so it is written as
one.
"""
from __future__ import annotations

import torch


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, exact. exponent: any integer dtype, -1022..1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def power_of_two_fp32(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, exact. exponent: any integer dtype, -149..127 (subnormals below -126)."""
    exponent = exponent.to(torch.int32)
    normal = (exponent + 127).clamp(min=0) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)
