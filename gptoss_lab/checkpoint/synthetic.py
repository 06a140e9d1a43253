"""The random weights of `synth`, made where they are wanted and never written: a source for a model, on any device.

120B with FP8 experts is 119 GB: more than many a disk has free, and twice what a host has. Random weights need neither.
Every tensor is a function of seed, name and place, so it is made on the GPU when the model asks for it, the same bytes
that `synth` would have written with this seed. The router sees logits of deviation 1 that are independent from expert
to expert, so experts are used about evenly (a run that is timed says how evenly).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gptoss_lab.checkpoint.manifest import expert_shape, manifest
from gptoss_lab.checkpoint.stored import Dense, Mxfp4
from gptoss_lab.checkpoint.synth import Piece, make_piece
from gptoss_lab.config import ModelConfig

_PIECE = 1 << 25            # elements made at a time: whole MXFP4 groups, a few hundred MB of temporaries


@dataclass(frozen=True)
class Synthetic:
    """A model's random weights in the released form: MXFP4 experts, the rest bf16.

    config: shapes; with fewer layers the rest are the same. seed, spread: as for `synth`. Methods as of a `Checkpoint`:
    Hugging Face names; device None is the CPU.
    """

    config: ModelConfig
    seed: int = 0
    spread: int = 3

    def tensor(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """A whole tensor, bf16, or uint8 for MXFP4 codes and scales. KeyError for a name the model does not have."""
        shapes = {spec.name: spec.shape for spec in manifest(self.config, "hf")}
        if name not in shapes:
            raise KeyError(f"{self.config.name} has no tensor {name}")
        where, count = device or "cpu", math.prod(shapes[name])
        dtype = torch.uint8 if name.endswith(("_blocks", "_scales")) else torch.bfloat16
        out = torch.empty(count, dtype=dtype, device=where)
        for start in range(0, count, _PIECE):
            piece = Piece(name, name, start, min(count, start + _PIECE))
            out[piece.start : piece.stop] = make_piece(piece, self.config, self.seed, self.spread, where).view(dtype)
        return out.view(shapes[name])

    def linear(self, name: str, device: torch.device | str | None = None) -> Dense:
        """A linear weight outside the experts; `name` without ".weight"."""
        return Dense(self.tensor(f"{name}.weight", device))

    def experts(self, layer: int, projection: str, *, device: torch.device | str | None = None) -> Mxfp4:
        """The matrices of a layer's experts; projection is "gate_up_proj" or "down_proj"."""
        expert_shape(self.config, projection)
        place = f"model.layers.{layer}.mlp.experts.{projection}"
        return Mxfp4(self.tensor(f"{place}_blocks", device), self.tensor(f"{place}_scales", device))
