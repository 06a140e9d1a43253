"""The output in e4m3, as an output projection in FP8 takes it: what is written where, and by a backend without it.

A token's heads side by side are a row of Hq * D columns. It is rounded to the layer's dtype first and then quantised,
with a scale for each 128 columns, so that the result is `norm_quantise` of the ordinary output, code for code. The own
prefill kernels do that before they store, where each group lies within a key head; for all others the ordinary output
is made, and quantised in a launch of its own.
"""
from __future__ import annotations

import torch

from gptoss_kernels.attention.backends import triton_obstacle
from gptoss_kernels.attention.layer import E4M3, AttentionError, LayerKind, check_device
from gptoss_kernels.reference.quant import Quantised, quantise_into

Output = torch.Tensor | Quantised


def whole_groups(layer: LayerKind) -> bool:
    """Whether the columns of a key head's queries are whole groups of 128: then one program holds each of them."""
    return layer.group * layer.head_dim % 128 == 0


def check_quantised(out: Quantised, rows: int, layer: LayerKind, device: torch.device) -> None:
    """AttentionError unless there is room for `rows` rows of Hq * D columns, and for their scales."""
    columns = layer.num_heads * layer.head_dim
    for name, part, width, dtype in (("out.values", out.values, columns, E4M3),
                                     ("out.scale", out.scale, -(-columns // 128), torch.float32)):
        if part.dim() != 2 or part.shape[0] < rows or part.shape[1] != width or part.dtype != dtype:
            raise AttentionError(f"{name} is {part.dtype} of shape {tuple(part.shape)}; {dtype} of at least [{rows}, "
                                 f"{width}] is needed")
        check_device(name, part, device)
    if not out.values.is_contiguous():
        raise AttentionError(f"out.values has strides {out.values.stride()}; contiguous rows are needed")


def places(out: Output, heads: int) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """What a kernel is told of its output: rows [T, heads, D], their scales or None, the scales' strides."""
    if isinstance(out, Quantised):
        return out.values.view(len(out.values), heads, -1), out.scale, out.scale.stride()
    return out, None, (1, 1)


def quantise_rows(rows: torch.Tensor, out: Quantised) -> None:
    """rows [T, Hq, D] to the first T rows of out."""
    flat = rows.flatten(1)
    if triton_obstacle(device=rows.device) is None:
        from gptoss_kernels.quant import norm_quantise

        norm_quantise(flat, out=out)
    else:
        quantise_into(flat, out)
