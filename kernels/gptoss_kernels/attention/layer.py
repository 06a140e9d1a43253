"""What a kind of layer is to an attention kernel, and the checks every backend shares.

gpt-oss has two kinds of layer, full and sliding; all layers of a kind have the same heads, dtype and window, so one
`LayerKind`, and one plan per step, serves them all. Checks live here, once, so that a wrong shape gives the same
one-line error whichever backend runs.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LSE_NAMES = (None, "with_sink", "without_sink")
E4M3 = torch.float8_e4m3fn


class AttentionError(ValueError):
    """An argument of attention does not fit; one line says which, its value, and what would fit."""


@dataclass(frozen=True)
class LayerKind:
    """What all layers that share a plan have in common.

    num_heads, num_kv_heads: query head h reads key head h // (num_heads / num_kv_heads). head_dim: a power of two from
    16 to 256. dtype: of q, k, v and out. window: number of keys a query sees, its own among them, or None for all.
    scale: of q.k, default 1/sqrt(head_dim). AttentionError names what does not fit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise AttentionError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} key heads")
        if self.head_dim not in (16, 32, 64, 128, 256):
            raise AttentionError(f"head_dim is {self.head_dim}; a power of two from 16 to 256 is needed")
        if self.dtype not in DTYPES:
            raise AttentionError(f"dtype is {self.dtype}; bfloat16, float16 or float32 is needed")
        if self.window is not None and self.window < 1:
            raise AttentionError(f"window is {self.window}; it counts keys and the query's own is one of them")
        if self.scale is not None and not self.scale > 0:
            raise AttentionError(f"scale is {self.scale}; a positive number is needed")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The factor of q.k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def window_left(self) -> int:
        """The window as FlashAttention counts it: keys before the query's own; -1 for all."""
        return -1 if self.window is None else self.window - 1


def as_device(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the current GPU."""
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


def layer_of(q: torch.Tensor, k: torch.Tensor, window: int | None, scale: float | None) -> LayerKind:
    """The LayerKind of tensors q [..., Hq, D] and k [..., Hkv, D]."""
    if q.dim() < 2 or k.dim() < 2:
        raise AttentionError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; [..., heads, head_dim] is needed")
    return LayerKind(q.shape[-2], k.shape[-2], q.shape[-1], q.dtype, window, scale)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: Sequence[int], layer: LayerKind, device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """AttentionError unless the tensor has this shape (-1: any length), this dtype (default: the layer's), this device,
    dense rows."""
    wanted = layer.dtype if dtype is None else dtype
    if tensor.dim() != len(shape) or any(w not in (-1, n) for w, n in zip(shape, tensor.shape, strict=True)):
        want = ", ".join("*" if n == -1 else str(n) for n in shape)
        raise AttentionError(f"{name} has shape {tuple(tensor.shape)}; [{want}] is needed")
    if tensor.dtype != wanted:
        raise AttentionError(f"{name} is {tensor.dtype}; {wanted} is needed")
    check_device(name, tensor, device)
    if tensor.numel() and tensor.stride(-1) != 1:
        raise AttentionError(f"{name} has stride {tensor.stride(-1)} in its last dimension; 1 is needed")


def check_sinks(sinks: torch.Tensor | None, layer: LayerKind, device: torch.device) -> torch.Tensor:
    """The sinks as one contiguous [num_heads] tensor of bf16 or fp32; None means -inf, that is no sink."""
    if sinks is None:
        return torch.full((layer.num_heads,), -torch.inf, dtype=torch.float32, device=device)
    if tuple(sinks.shape) != (layer.num_heads,):
        raise AttentionError(f"sinks has shape {tuple(sinks.shape)}; one logit per query head, [{layer.num_heads}], "
                             "is needed")
    if sinks.dtype not in (torch.bfloat16, torch.float32):
        raise AttentionError(f"sinks is {sinks.dtype}; bfloat16 or float32 is needed")
    check_device("sinks", sinks, device)
    return sinks.contiguous()


def check_lse(lse: str | None) -> None:
    """AttentionError unless lse is None, "with_sink" or "without_sink"."""
    if lse not in LSE_NAMES:
        raise AttentionError(f"lse is {lse!r}; None, 'with_sink' or 'without_sink' is needed")


def offsets(name: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Row offsets [B + 1] as int64 on the CPU: from 0, never falling."""
    cu = torch.as_tensor(values).to("cpu", torch.int64)
    if cu.dim() != 1 or cu.numel() < 1 or cu[0] != 0 or bool((cu[1:] < cu[:-1]).any()):
        raise AttentionError(f"{name} is {cu.tolist()}; offsets that start at 0 and never fall are needed")
    return cu


def lengths(name: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Sequence lengths [B] as int64 on the CPU, none negative."""
    lens = torch.as_tensor(values).to("cpu", torch.int64)
    if lens.dim() != 1 or bool((lens < 0).any()):
        raise AttentionError(f"{name} is {lens.tolist()}; one length per sequence, none negative, is needed")
    return lens


def check_pages(layer: LayerKind, kv_lens: torch.Tensor, page_table: torch.Tensor, page_size: int) -> None:
    """AttentionError unless the page table [B, max_pages] int32 has room for these lengths (CPU tensor)."""
    if page_size < 1:
        raise AttentionError(f"page_size is {page_size}; at least 1 token is needed")
    if page_table.dim() != 2 or page_table.shape[0] != kv_lens.numel() or page_table.dtype != torch.int32:
        raise AttentionError(f"page_table is {page_table.dtype} of shape {tuple(page_table.shape)}; int32 "
                             f"[{kv_lens.numel()}, pages] is needed")
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    if longest > page_table.shape[1] * page_size:
        raise AttentionError(f"a sequence of {longest} tokens does not fit {page_table.shape[1]} pages of {page_size}")


def check_kv_dtype(kv_dtype: torch.dtype | None, layer: LayerKind) -> torch.dtype:
    """The dtype of the pages: the layer's (None), or e4m3; AttentionError for another."""
    if kv_dtype not in (None, layer.dtype, E4M3):
        raise AttentionError(f"kv_dtype is {kv_dtype}; {layer.dtype}, the layer's, or {E4M3} is needed")
    return layer.dtype if kv_dtype is None else kv_dtype


def check_scales(
    scales: tuple[torch.Tensor, torch.Tensor] | None, kv_dtype: torch.dtype, layer: LayerKind, device: torch.device
) -> None:
    """AttentionError unless e4m3 pages come with two contiguous fp32 [Hkv], positive where they lie on the CPU, and
    others with none."""
    if (scales is None) != (kv_dtype != E4M3):
        raise AttentionError(f"pages are {kv_dtype} and scales {'missing' if scales is None else 'given'}; e4m3 pages "
                             "have scales and others none")
    for name, scale in zip(("key", "value"), scales or (), strict=False):
        if tuple(scale.shape) != (layer.num_kv_heads,) or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise AttentionError(f"the {name} scales are {scale.dtype} of shape {tuple(scale.shape)}; contiguous "
                                 f"float32 [{layer.num_kv_heads}], one per key head, is needed")
        check_device(f"the tensor of {name} scales", scale, device)
        if scale.device.type == "cpu" and not bool((scale > 0).all()):
            raise AttentionError(f"the {name} scales are {scale.tolist()}; positive numbers are needed")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """AttentionError unless the tensor is on this device; one without an index is any of its type."""
    here = tensor.device
    if here.type != device.type or (here.index is not None and device.index is not None and here.index != device.index):
        raise AttentionError(f"{name} is on {here}; {device} is needed")
