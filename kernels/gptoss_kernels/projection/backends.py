"""Where the Triton kernels of this room can run."""
from __future__ import annotations

import torch
import triton


def triton_obstacle(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None, **needs: object
) -> str | None:
    """None on an NVIDIA GPU or in the interpreter, for bf16 and fp32; else what stands in the way, in one line."""
    if dtype not in (None, torch.bfloat16, torch.float32):
        return f"it takes torch.bfloat16 or torch.float32; dtype is {dtype}"
    if triton.knobs.runtime.interpret or (device is not None and torch.device(device).type == "cuda"):
        return None
    return "it needs an NVIDIA GPU, or the interpreter (TRITON_INTERPRET=1 before Triton is imported)"
