"""The forms of the operation in the registry, and how `auto` picks a backend for each.

Full and sliding layers are registered apart because other kernels win them, and so is the decode of a single sequence
over a full cache. Recorded (`data/measured/attention/h200.jsonl`): for full prefill the own Gluon kernel before FA3 and
the own Triton kernel; for decode over full caches XQA, before or level with the own Triton kernel, but not for a single
sequence; for sliding layers the own Triton kernel. `choose` returns the backend with its reason, in words.

A plan class takes (layer, ...) and is what a backend registers; an obstacle gets the needs (layer, device, lse,
page_size, kv_dtype) and returns one line or None. A plan whose `quantises` is true writes e4m3 itself when `out` is a
`Quantised`. Pages in e4m3 are read by `triton` and `reference`; FlashInfer's
kernels can read such pages too, XQA among them, but are not wired for it here.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from gptoss_kernels import registry
from gptoss_kernels.attention.layer import E4M3, LayerKind

FORMS = ("attention.prefill", "attention.paged_prefill", "attention.paged_decode")
SINGLE = "full, one sequence"

# Rank of each backend, best first, by form and kind of layer.
ORDER = {
    ("attention.prefill", "full"): ("gluon", "flashinfer-fa3", "triton", "flashinfer-fa2", "reference"),
    ("attention.prefill", "sliding"): ("triton", "flashinfer-fa2", "flashinfer-fa3", "gluon", "reference"),
    ("attention.paged_prefill", "full"): ("flashinfer-fa3", "triton", "flashinfer-fa2", "reference"),
    ("attention.paged_prefill", "sliding"): ("triton", "flashinfer-fa2", "flashinfer-fa3", "reference"),
    ("attention.paged_decode", "full"): ("xqa", "triton", "flashinfer-fa2", "reference"),
    ("attention.paged_decode", SINGLE): ("triton", "xqa", "flashinfer-fa2", "reference"),
    ("attention.paged_decode", "sliding"): ("triton", "xqa", "flashinfer-fa2", "reference"),
}


def register_plan(form: str, backend: str, obstacle: Callable[..., str | None]) -> Callable[[type], type]:
    """Decorator: a plan class is this backend of the form, for every kind of layer, at its rank in ORDER."""

    def add(plan: type) -> type:
        for (of, kind), order in ORDER.items():
            if of == form:
                registry.register(f"{form}.{kind}", backend, rank=order.index(backend), obstacle=obstacle)(plan)
        return plan

    return add


def choose_backend(form: str, backend: str, batch: int | None = None, **needs: Any) -> registry.Choice:
    """The registry's choice; for "auto" the reason also says what the order rests on. batch: sequences of a decode.
    needs: layer, device, ..."""
    kind = _kind(form, needs["layer"], batch)
    choice = registry.choose(f"{form}.{kind}", backend, **needs)
    if backend != "auto":
        return choice
    order = " > ".join(ORDER[form, kind])
    return dataclasses.replace(choice, reason=f"{choice.reason}; order for {kind} layers: {order}")


def _kind(form: str, layer: LayerKind, batch: int | None) -> str:
    if layer.window is not None:
        return "sliding"
    return SINGLE if batch == 1 and (form, SINGLE) in ORDER else "full"


def hopper_obstacle(device: torch.device) -> str | None:
    """None on a GPU of compute capability 9.0, else what the device is instead."""
    if device.type != "cuda":
        return f"needs a Hopper GPU, the tensors are on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) == (9, 0) else f"needs compute capability 9.0, this GPU has {major}.{minor}"


def triton_obstacle(*, device: torch.device, kv_dtype: torch.dtype | None = None, **_: Any) -> str | None:
    """None where Triton is installed and can run: on a GPU, or anywhere in the interpreter."""
    if not _installed("triton"):
        return "triton is not installed"
    from gptoss_kernels.attention.triton_prefill import INTERPRETED

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if kv_dtype == E4M3 and (major, minor) < (8, 9):
            return f"e4m3 pages need compute capability 8.9, this GPU has {major}.{minor}"
        return None
    return None if INTERPRETED else "needs a GPU; on the CPU set TRITON_INTERPRET=1 before Python starts"


def flashinfer_obstacle(
    *, layer: LayerKind, device: torch.device, blind_queries: bool = False, kv_dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """What stands in the way of FlashInfer's kernels, or None."""
    if kv_dtype == E4M3:
        return "is not wired for e4m3 pages; triton reads them"
    if not _installed("flashinfer"):
        return "flashinfer-python is not installed"
    if layer.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, not {layer.dtype}"
    if layer.head_dim not in (64, 128, 256):
        return f"takes head_dim 64, 128 or 256, not {layer.head_dim}"
    if blind_queries:
        return "a sequence has more queries than keys"
    return hopper_obstacle(device)


def xqa_obstacle(
    *, layer: LayerKind, device: torch.device, page_size: int, lse: str | None, kv_dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """What stands in the way of the XQA decode kernel, or None."""
    if lse is not None:
        return "returns no LSE"
    if page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {page_size}"
    if layer.group > 32:
        return f"takes at most 32 query heads per key head, not {layer.group}"
    return flashinfer_obstacle(layer=layer, device=device, kv_dtype=kv_dtype)


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
