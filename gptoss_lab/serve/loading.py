"""A loop on a model, made in the engine's own process."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gptoss_lab.engine import Engine, Loop
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.memory import pool_for, positions_in
from gptoss_lab.engine.opening import STEP_TOKENS, open_model
from gptoss_lab.model import Transformer

KV_SHARE = 0.8
"""Of the GPU memory that a plain model leaves free, what keys and values may take; the rest is for a step's work."""
PLAIN_STEP_TOKENS = 512


def load_loop(
    checkpoint: str | Path, device: str = "cpu", dtype: str = "bfloat16", max_batch: int = 64,
    max_positions: int | None = None, step_tokens: int | None = None, forward: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Loop:
    """Load a checkpoint and return a loop on it.

    dtype: "bfloat16" or "float32". max_batch: see `Loop`. max_positions: tokens that all caches together can hold, in
    pages made once; None takes what fits, and for the plain model on the CPU caches that grow. step_tokens: new tokens
    that go through the model at once, 512 of the plain one and 2048 of the fast one unless told otherwise; a long
    prompt holds up the others for one such step. forward: "auto", "plain" or "fast", see `open_model`. say: gets the
    line that says which it is, and why. Errors: those of `open_model`.
    """
    opened = open_model(checkpoint, device, getattr(torch, dtype), forward=forward, sequences=max_batch,
                        positions=max_positions, step_tokens=step_tokens or STEP_TOKENS, capture=True)
    if say is not None:
        say(opened.said)
    model = opened.model
    if opened.fast:
        return Loop(Engine(model, PlainDecoder(model, step_tokens or STEP_TOKENS)), max_batch)
    if max_positions is None and model.device.type == "cuda":
        max_positions = _positions_on_gpu(model, max_batch)
    pool = None if max_positions is None else pool_for(model, max_positions, max_batch)
    return Loop(Engine(model, PlainDecoder(model, step_tokens or PLAIN_STEP_TOKENS, pool)), max_batch)


def _positions_on_gpu(model: Transformer, sequences: int) -> int:
    """As many as the free memory holds, at most all that the sequences could come to hold."""
    free, _ = torch.cuda.mem_get_info(model.device)
    room = positions_in(int(KV_SHARE * free), model.config, sequences, value_bytes=model.dtype.itemsize)
    if room < 1:
        raise ValueError(f"{free / 1e9:.1f} GB of GPU memory are free beside the weights; keys and values of "
                         f"{sequences} sequences do not fit: serve fewer at once (--batch)")
    return min(room, sequences * model.config.max_position_embeddings)
