"""A model for the commands that need one: which checkpoint, on which device, in which precision."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gptoss_lab.cli.output import note

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


def load(
    checkpoint: Path, device: str, dtype: str, draft: Path | None = None, draft_tokens: int = 4, *,
    forward: str = "auto", sequences: int = 1, positions: int | None = None,
) -> Engine:
    """Load a checkpoint and put the engine in front of it; with a draft model's checkpoint, a speculative one.

    forward, sequences, positions: see `gptoss_lab.engine.opening.open_model`.
    """
    import torch

    from gptoss_lab.engine import Engine
    from gptoss_lab.engine.decoders.plain import PlainDecoder
    from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
    from gptoss_lab.engine.opening import STEP_TOKENS, open_model

    where, precision = pick_device(device), torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    options = {"forward": forward, "sequences": sequences, "positions": positions,
               "draft": 0 if draft is None else draft_tokens}
    models = [open_model(path, where, precision, **options) for path in (checkpoint, draft) if path is not None]
    if tells(where, forward):
        note(models[0].said)
    model, step = models[0].model, {"step_tokens": STEP_TOKENS} if models[0].fast else {}
    if draft is None:
        return Engine(model, PlainDecoder(model, **step))
    return Engine(model, SpeculativeDecoder(model, models[1].model, draft_tokens, **step))


def tells(device: torch.device, forward: str) -> bool:
    """Whether there was a choice of models to speak of: on a GPU, or where one was asked for."""
    return device.type == "cuda" or forward != "auto"


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
