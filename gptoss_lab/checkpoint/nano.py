"""Where the nano checkpoint is: the trained one of `data/nano` if there is one, else a random one made once, cached."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gptoss_lab.cache import cache_folder
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.synth import synth
from gptoss_lab.config import preset

_FORM = 1           # raise when `synth` gives other weights for the same seed


def trained_nano() -> Path | None:
    """`data/nano` of this checkout when it holds a checkpoint, else None."""
    folder = Path(__file__).resolve().parents[2] / "data" / "nano"
    return folder if (folder / "config.json").is_file() else None


def ensure_nano(seed: int = 0) -> Path:
    """The folder of a nano checkpoint (178 MB, the full vocabulary), made at first use.

    Two processes may ask at once: each writes its own folder and the first to finish gives it the name. The name
    holds a digest of the configuration, so a changed preset makes a new one. seed: of the random weights; the trained
    one has no seed.
    """
    trained = trained_nano()
    if trained is not None:
        return trained
    config = preset("nano")
    digest = hashlib.sha256(json.dumps([_FORM, config.to_hf_dict()], sort_keys=True).encode()).hexdigest()[:8]
    path = cache_folder() / f"nano-seed{seed}-{digest}"
    if not path.exists():
        try:
            synth(config, path, seed=seed)
        except CheckpointError:
            if not path.exists():
                raise
    open_checkpoint(path)
    return path
