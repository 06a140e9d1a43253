"""What every notebook does first and last: which checkpoint, which device, and giving the memory back.

With GPTOSS_LAB_CHECKPOINT set to a folder the notebooks run on those weights; otherwise on the nano checkpoint, a very
small model in the released format: the trained one of `data/nano`, or, in a checkout without that file, random weights
made on the spot. Nothing is downloaded either way.
"""
from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.cache import cache_folder, made_once
from gptoss_lab.checkpoint import Checkpoint, CheckpointError, ensure_nano, open_checkpoint
from gptoss_lab.checkpoint.convert import MANIFEST_NAME, convert
from gptoss_lab.checkpoint.nano import trained_nano
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.model import load_model

SETTING = "GPTOSS_LAB_CHECKPOINT"


def chosen_checkpoint() -> Path:
    """The folder that GPTOSS_LAB_CHECKPOINT names, or the nano checkpoint. CheckpointError if it is absent."""
    named = os.environ.get(SETTING)
    if not named:
        return ensure_nano()
    if not Path(named).exists():
        raise CheckpointError(f"{SETTING} names {named}, which does not exist; unset it to use the nano checkpoint")
    return Path(named)


def has_random_weights() -> bool:
    """Whether the chosen checkpoint is the random one made where no trained one is, which answers with nonsense."""
    return not os.environ.get(SETTING) and trained_nano() is None


def writer(sampling: SamplingParams) -> Callable[[list[int]], list[int]]:
    """A function from prompt ids to the ids that the chosen checkpoint writes after them.

    For a widget that may never be used: the model is loaded at the first call and kept as long as the function is.
    """
    engine = functools.cache(lambda: Engine(load_model(chosen_checkpoint(), device())))
    return lambda prompt: engine().complete([prompt], sampling)[0].tokens


def describe(checkpoint: Checkpoint) -> str:
    """One line: which model, in which layout, how much of it, and whether its weights mean anything. No local path."""
    kind = f"the weights of {SETTING}" if os.environ.get(SETTING) else "weights trained by this project"
    kind = "random weights" if has_random_weights() else kind
    return (f"{checkpoint.config.name}, {checkpoint.layout} layout, {len(checkpoint.specs)} tensors, "
            f"{checkpoint.nbytes:,} bytes, {kind}")


def open_chosen() -> Checkpoint:
    """`chosen_checkpoint`, opened: every tensor checked against the config, nothing read yet.

    CheckpointError if it is no released form: the lessons begin with MXFP4.
    """
    checkpoint = open_checkpoint(chosen_checkpoint())
    if checkpoint.layout not in ("hf", "original"):
        raise CheckpointError(f"{SETTING} names a checkpoint in the {checkpoint.layout} layout; the notebooks start "
                              "from MXFP4 as released (hf or original) and convert it themselves")
    return checkpoint


def fp8_copy(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
    """The FP8 conversion of a checkpoint, kept in the cache folder and made at first use, and its manifest.

    Keys of the manifest: "totals" and "rows" (one per tensor), see gptoss_lab.checkpoint.convert.
    """
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files]
    mark = hashlib.sha256(repr((str(checkpoint.path.resolve()), stats)).encode()).hexdigest()[:12]
    target = cache_folder() / "fp8" / f"{checkpoint.config.name}-{mark}"
    made_once(target, lambda path: convert(checkpoint.path, path, device=device()))
    return open_checkpoint(target), json.loads((target / MANIFEST_NAME).read_text(encoding="utf-8"))


def device() -> torch.device:
    """The GPU if torch can use one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def release() -> str:
    """Collect what nothing refers to any more, return cached GPU memory, and say in a line how much is still in use."""
    gc.collect()
    if not torch.cuda.is_available():
        return "no GPU memory was used"
    torch.cuda.empty_cache()
    return f"{torch.cuda.memory_allocated() / 2**20:.0f} MiB of GPU memory still in use"
