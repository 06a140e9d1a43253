"""The own Gluon kernel as a backend: full causal prefill on a Hopper GPU."""
from __future__ import annotations

import functools

import torch

from gptoss_kernels.attention.backends import hopper_obstacle, register_plan, triton_obstacle
from gptoss_kernels.attention.layer import AttentionError, LayerKind
from gptoss_kernels.attention.quantised import places, whole_groups
from gptoss_kernels.upload import upload

LOG2E = 1.4426950408889634
OPTIONS = {"BLOCK": 128, "DEPTH": 2}          # keys per block; blocks fetched ahead


def gluon_obstacle(*, layer: LayerKind, device: torch.device, blind_queries: bool = False, **_: object) -> str | None:
    """What stands in the way of the Gluon prefill kernel, or None."""
    if layer.window is not None:
        return "takes full layers only"
    if layer.head_dim != 64 or layer.dtype not in (torch.bfloat16, torch.float16):
        return f"takes head_dim 64 in bfloat16 or float16, not {layer.head_dim} in {layer.dtype}"
    if layer.group not in (1, 2, 4, 8, 16, 32, 64):
        return f"takes a power of two of query heads per key head, not {layer.group}"
    if blind_queries:
        return "a sequence has more queries than keys"
    return hopper_obstacle(device) or triton_obstacle(device=device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@register_plan("attention.prefill", "gluon", gluon_obstacle)
class GluonPrefill:
    """Ragged full prefill with the warp-specialised kernel."""

    def __init__(self, layer: LayerKind, cu_q: torch.Tensor, cu_k: torch.Tensor, *, device, lse: str | None) -> None:
        from gptoss_kernels.attention.gluon_prefill import ROWS, WARPGROUPS
        from gptoss_kernels.attention.triton_prefill import tile_table

        self._layer, self._lse, self.quantises = layer, lse, whole_groups(layer)
        queries = WARPGROUPS * max(1, ROWS // layer.group)
        self._tiles = upload(tile_table(cu_q, cu_k.diff(), cu_k[:-1], queries), device)

    def __call__(self, q, k, v, sinks, out):
        from gptoss_kernels.attention.gluon_prefill import ROWS, gluon_prefill_kernel

        n, programs = self._layer, _multiprocessors(q.device)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._lse else None
        block, (rows, scales, strides) = OPTIONS["BLOCK"], places(out, n.num_heads)
        gluon_prefill_kernel[(programs,)](
            _descriptor(q, [ROWS // n.group, n.group, n.head_dim]), _descriptor(_flat("k", k), [block, n.head_dim]),
            _descriptor(_flat("v", v), [block, n.head_dim]), sinks, rows, rows if lse is None else lse, self._tiles,
            self._tiles.shape[0], n.num_kv_heads, programs, n.softmax_scale * LOG2E, rows.stride(0), rows.stride(1),
            scales, *strides, NUM_HEADS=n.num_heads, GROUP=n.group, HEAD_DIM=n.head_dim,
            SINK_FIRST=self._lse != "without_sink", LSE=lse is not None, QUANTISE=scales is not None, num_warps=4,
            **OPTIONS,
        )
        return out if lse is None else (out, lse)


def _flat(name: str, keys: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] seen as [T, heads * D]; the heads of a token must lie side by side."""
    if keys.shape[1] > 1 and keys.stride(1) != keys.shape[2]:
        raise AttentionError(f"{name} has strides {keys.stride()}; the gluon backend needs heads {keys.shape[2]} apart")
    return keys.as_strided((keys.shape[0], keys.shape[1] * keys.shape[2]), (keys.stride(0), 1))


@functools.cache
def tile_layout(rank: int):
    """How a box lies in shared memory: rows of 128 bytes, swizzled as the tensor core reads them."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _descriptor(tensor: torch.Tensor, box: list[int]):
    """A TMA descriptor that fetches boxes of this shape."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, box, tile_layout(len(box)))
