"""Where the nano checkpoint is: the trained one of `data/nano` if there is one, else a random one made once, cached.

Beside the trained one lie what drafts for it: a smaller model (`ensure_nano_draft`) and prediction heads.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from gptoss_lab.cache import cache_folder, made_once
from gptoss_lab.checkpoint.compact import expand
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.synth import synth
from gptoss_lab.config import preset

_FORM = 1           # raise when `synth` gives other weights for the same seed


def trained_nano() -> Path | None:
    """The compact file of the trained nano in `data/nano` of this checkout (see compact.py), or None."""
    file = Path(__file__).resolve().parents[2] / "data" / "nano" / "nano.safetensors"
    return file if file.is_file() else None


def trained_beside(name: str) -> Path | None:
    """A file that was trained for the trained nano and lies beside it, "draft.safetensors" or "mtp.safetensors", or
    None."""
    trained = trained_nano()
    file = None if trained is None else trained.with_name(name)
    return file if file is not None and file.is_file() else None


def ensure_nano(seed: int = 0) -> Path:
    """The folder of a nano checkpoint in the released form (about 190 MB, the full vocabulary), made at first use.

    The trained one, expanded from its compact file, if there is one, else random weights. The folder's name holds a
    digest of what it is made from, so a changed preset or file makes a new one. seed: of the random weights.
    """
    trained = trained_nano()
    if trained is not None:
        return _expanded(trained, "nano-trained")
    config = preset("nano")
    digest = hashlib.sha256(json.dumps([_FORM, config.to_hf_dict()], sort_keys=True).encode()).hexdigest()[:8]
    return _checked(
        cache_folder() / f"nano-seed{seed}-{digest}", lambda path: synth(config, path, seed=seed)
    )


def ensure_nano_draft() -> Path | None:
    """The folder of the draft model trained for nano (about 110 MB), expanded at first use; None if there is none."""
    compact = trained_beside("draft.safetensors")
    return None if compact is None else _expanded(compact, "nano-draft")


def _expanded(compact: Path, name: str) -> Path:
    """A compact file's folder in the cache; its name holds a digest of the file."""
    digest = hashlib.sha256(compact.read_bytes()).hexdigest()[:12]
    return _checked(cache_folder() / f"{name}-{digest}", lambda path: expand(compact, path))


def _checked(path: Path, make: Callable[[Path], object]) -> Path:
    """The checkpoint at `path`, made there if it is absent."""
    open_checkpoint(made_once(path, make))
    return path
