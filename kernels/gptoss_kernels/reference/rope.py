"""Rotary positions stretched with YaRN, as gpt-oss trained them: ramp bounds not rounded, half-split pairs.

Pair i of a head joins elements i and i + D/2 and turns by position * omega_i. YaRN keeps the fast pairs (those that
turn more than `beta_fast` times in the original context), divides the slow ones by `factor`, and blends linearly in
between; it also multiplies cos and sin by one concentration, so content scores grow by its square (the sink does not).
The angle is the fp32 product of position and frequency followed by an accurate cos and sin, because that is what the
model was trained with: at position 1e5 a float64 angle is further from the model, not closer.
"""
from __future__ import annotations

import math

import torch


def rope_ramp(
    head_dim: int, theta: float, beta_fast: float, beta_slow: float, original_context: int, truncate: bool = False
) -> tuple[float, float]:
    """(low, high): the pair indices between which the ramp rises from 0 to 1. Rounded outward only if `truncate`.

    ValueError unless 0 < low < high < D/2 - 1: a ramp that leaves the head is cut off in different ways elsewhere.
    """

    def pair_turning(times: float) -> float:
        return head_dim / 2 * math.log(original_context / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if not 0 < low < high < head_dim / 2 - 1:
        raise ValueError(f"rope_ramp: the ramp runs from pair {low:.3f} to {high:.3f}; it must rise within the "
                         f"{head_dim // 2} pairs of a head")
    return (float(math.floor(low)), float(math.ceil(high))) if truncate else (low, high)


def rope_frequencies(
    head_dim: int,
    theta: float = 150000.0,
    factor: float = 32.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_context: int = 4096,
    truncate: bool = False,
) -> torch.Tensor:
    """omega [head_dim / 2], float64, radians per position (spec values: omega_8 = 5.0813e-2, omega_17 = 1.2932e-4)."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * pairs / head_dim)
    low, high = rope_ramp(head_dim, theta, beta_fast, beta_slow, original_context, truncate)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def rope_concentration(factor: float) -> float:
    """The factor on cos and sin: 0.1 ln(factor) + 1 (1.3465735902799727 for 32), or 1 without stretching."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(
    positions: torch.Tensor, frequencies: torch.Tensor, concentration: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [T, D/2] fp32, times the concentration. positions: [T] integers. frequencies: [D/2]."""
    omega = frequencies.to(device=positions.device, dtype=torch.float32)
    angle = positions.to(torch.float32)[:, None] * omega[None, :]
    return angle.cos() * concentration, angle.sin() * concentration


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head: o_i = x_i c - x_{i+D/2} s, o_{i+D/2} = x_{i+D/2} c + x_i s, in fp32, rounded once.

    x: [T, heads, D]. cos, sin: [T, D/2]. Returns x's shape and dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    c, s = cos.to(wide)[:, None, :], sin.to(wide)[:, None, :]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)
