"""The end of a sharded layer in plain torch: sum the ranks' parts, add the residual, norm for what comes next."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_kernels.reference.norm import rms_norm


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
