"""The cos and sin of a step's positions: made once per step, used by every layer, sliding and full alike."""
from __future__ import annotations

import torch
from torch import nn

from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies, rope_table
from gptoss_lab.config import RopeConfig


class Rope(nn.Module):
    """Rotary frequencies of a model, YaRN ramp and concentration included.

    frequencies: [D / 2] fp32 radians per position. The angle is the fp32 product of position and frequency, as in the
    model's own code; a table for all 131,072 positions would be 32 MiB, the few rows of a step cost nothing.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        super().__init__()
        omega = rope_frequencies(
            head_dim, config.theta, config.factor, config.beta_fast, config.beta_slow, config.original_context,
            config.truncate,
        )
        self.register_buffer("frequencies", omega.to(torch.float32).to(device), persistent=False)
        self.concentration = rope_concentration(config.factor)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [T] int64, from 0 -> cos, sin, each [T, D / 2] fp32, times the concentration."""
        return rope_table(positions, self.frequencies, self.concentration)
