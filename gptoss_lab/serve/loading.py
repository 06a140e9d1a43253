"""A loop on a model, made in the engine's own process."""
from __future__ import annotations

from pathlib import Path

import torch

from gptoss_lab.engine import Engine, Loop
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.model import load_model


def load_loop(
    checkpoint: str | Path, device: str = "cpu", dtype: str = "bfloat16", max_batch: int = 64,
    max_positions: int | None = None, step_tokens: int = 512,
) -> Loop:
    """Load a checkpoint and return a loop on it.

    dtype: "bfloat16" or "float32". max_batch, max_positions: see `Loop`. step_tokens: new tokens that go through the
    model at once; a long prompt holds up the others for one such step. Errors: those of `load_model`.
    """
    model = load_model(checkpoint, device, getattr(torch, dtype))
    return Loop(Engine(model, PlainDecoder(model, step_tokens)), max_batch, max_positions)
