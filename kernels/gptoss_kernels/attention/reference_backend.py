"""The plain torch form as a backend: any device, any argument, and what every other backend is tested against.

Pages are gathered into ragged keys first, so the paged forms are the ragged one seen through a page table; rows of e4m3
pages are widened to fp32 and multiplied by their scale there.
"""
from __future__ import annotations

import torch

from gptoss_kernels.attention.backends import register_plan
from gptoss_kernels.attention.layer import LayerKind
from gptoss_kernels.reference.attention import gather_pages, log_sum_exp_without_sink, sink_attention


def _never_in_the_way(**_: object) -> None:
    return None


def _attend(layer: LayerKind, lse: str | None, q, k, v, sinks, out, cu_q, cu_k):
    result, with_sink = sink_attention(q, k, v, sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=layer.window,
                                       scale=layer.softmax_scale)
    out.copy_(result)
    if lse is None:
        return out
    if lse == "with_sink":
        return out, with_sink
    return out, log_sum_exp_without_sink(q, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window=layer.window,
                                         scale=layer.softmax_scale)


def _rows(pages, lens, table, scale):
    """The cached rows one after the other, and their offsets; scale: [Hkv] of e4m3 pages, or None."""
    if scale is None:
        return gather_pages(pages, lens, table)
    rows, offsets = gather_pages(pages.view(torch.uint8), lens, table)           # bytes can be indexed on any device
    return rows.view(pages.dtype).float() * scale[:, None], offsets


@register_plan("attention.prefill", "reference", _never_in_the_way)
class ReferencePrefill:
    """Ragged prefill in fp32 torch."""

    def __init__(self, layer: LayerKind, cu_q: torch.Tensor, cu_k: torch.Tensor, *, device, lse: str | None) -> None:
        self._layer, self._cu_q, self._cu_k, self._lse = layer, cu_q, cu_k, lse

    def __call__(self, q, k, v, sinks, out):
        return _attend(self._layer, self._lse, q, k, v, sinks, out, self._cu_q, self._cu_k)


@register_plan("attention.paged_prefill", "reference", _never_in_the_way)
class ReferencePagedPrefill:
    """Prefill over a paged cache in fp32 torch."""

    def __init__(self, layer, cu_q, kv_lens, page_table, *, page_size: int, device, lse: str | None) -> None:
        self._layer, self._cu_q, self._lens, self._table, self._lse = layer, cu_q, kv_lens, page_table, lse

    def __call__(self, q, k_pages, v_pages, sinks, out, scales=(None, None)):
        k, cu_k = _rows(k_pages, self._lens, self._table, scales[0])
        v, _ = _rows(v_pages, self._lens, self._table, scales[1])
        return _attend(self._layer, self._lse, q, k, v, sinks, out, self._cu_q, cu_k)


@register_plan("attention.paged_decode", "reference", _never_in_the_way)
class ReferencePagedDecode:
    """Decode over a paged cache in fp32 torch; reads the lengths back from the device at every run."""

    def __init__(self, layer, kv_lens, page_table, *, page_size: int, lse: str | None) -> None:
        self._layer, self._lens, self._table, self._lse = layer, kv_lens, page_table, lse

    def step(self, kv_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Nothing to prepare: the run reads the plan's buffers."""

    def __call__(self, q, k_pages, v_pages, sinks, out, scales=(None, None)):
        k, cu_k = _rows(k_pages, self._lens, self._table, scales[0])
        v, _ = _rows(v_pages, self._lens, self._table, scales[1])
        return _attend(self._layer, self._lse, q, k, v, sinks, out, range(q.shape[0] + 1), cu_k)
