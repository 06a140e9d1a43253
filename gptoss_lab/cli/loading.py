"""A model for the commands that need one: which checkpoint, on which device, in which precision."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

    from gptoss_lab.engine import Engine


def choose_checkpoint(checkpoint: Path | None) -> tuple[Path, bool]:
    """The folder to load, and whether its weights are known to be random: the one named, else the nano one."""
    from gptoss_lab.checkpoint import ensure_nano
    from gptoss_lab.checkpoint.nano import trained_nano

    if checkpoint is not None:
        return checkpoint, False
    return ensure_nano(), trained_nano() is None


def load(checkpoint: Path, device: str, dtype: str) -> Engine:
    """Load a checkpoint and put the engine in front of it."""
    import torch

    from gptoss_lab.engine import Engine
    from gptoss_lab.model import load_model

    where = pick_device(device)
    return Engine(load_model(checkpoint, where, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)))


def pick_device(name: str) -> torch.device:
    """"auto" is a GPU where torch can use one; a device that is not there is a usage error."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is no device; cpu, cuda, cuda:1 or auto", param_hint="--device") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not supported; cpu, cuda, cuda:1 or auto", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise typer.BadParameter(f"{name!r}: torch sees {count} GPUs here; `gptoss-lab capabilities` says why",
                                 param_hint="--device")
    return device
