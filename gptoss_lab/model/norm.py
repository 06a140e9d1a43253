"""RMSNorm as a module: a weight and the operation that was chosen for it."""
from __future__ import annotations

import torch
from torch import nn

from gptoss_lab.model.operations import Operations


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32 inside, rounded once to x's dtype.

    weight: [H] fp32, the exact value of the file's bf16.
    """

    def __init__(self, size: int, eps: float, operations: Operations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self._rms_norm = operations.rms_norm.function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, H] -> [T, H], same dtype."""
        return self._rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
