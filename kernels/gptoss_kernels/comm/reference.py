"""The end of a sharded layer in plain torch: sum the ranks' parts, add the residual, norm for what comes next."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import quantise_groups

ROW_STEP = 8            # own rows begin at a multiple of it


def all_reduce_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + sum of the parts, and its RMSNorm.

    parts: one [rows, H] for each rank. residual: [rows, H]. weight: [H]. The sum is fp32 at least, in the order of the
    ranks, the residual last, and rounded once; the norm is that of the rounded sum. Returns both [rows, H] in the
    residual's dtype.
    """
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = torch.zeros(residual.shape, dtype=wide, device=residual.device)
    for part in parts:
        total = total + part.to(wide)
    summed = (total + residual.to(wide)).to(residual.dtype)
    return summed, rms_norm(summed, weight, eps)


def own_ranges(rows: int, world: int) -> list[range]:
    """Which of `rows` rows belong to each rank: contiguous, as even as multiples of ROW_STEP allow, the last ones
    perhaps none."""
    steps = -(-rows // ROW_STEP)
    starts = [min(rows, ROW_STEP * -(-steps * rank // world)) for rank in range(world + 1)]
    return [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def sum_own_rows(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `all_reduce_norm`, with the norm in e4m3: the sum, codes [rows, H] and scales [rows, ceil(H / 128)]."""
    summed, normed = all_reduce_norm(parts, residual, weight, eps)
    return summed, *quantise_groups(normed)
