"""Where the Triton kernels of this room can run."""
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton


def sizes_obstacle(needs: Mapping[str, object], most: int | None = None) -> str | None:
    """None if the layer's sizes among `needs` are what the CUDA kernels of this room take: multiples of 64, and rows
    that they read (all but qkv_size) of at most `most`; else the first that is not, in one line."""
    for axis in ("hidden_size", "q_size", "qkv_size"):
        size = needs.get(axis)
        if size is not None and (size % 64 or (most is not None and size > most and axis != "qkv_size")):
            up_to = "" if most is None else f" up to {most}"
            return f"it needs {axis} in multiples of 64{up_to}; it is {size}"
    return None


def triton_obstacle(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None, **needs: object
) -> str | None:
    """None on an NVIDIA GPU or in the interpreter, for bf16 and fp32; else what stands in the way, in one line."""
    if dtype not in (None, torch.bfloat16, torch.float32):
        return f"it takes torch.bfloat16 or torch.float32; dtype is {dtype}"
    if triton.knobs.runtime.interpret or (device is not None and torch.device(device).type == "cuda"):
        return None
    return "it needs an NVIDIA GPU, or the interpreter (TRITON_INTERPRET=1 before Triton is imported)"
