"""FlashInfer's FA2 and FA3 kernels with our sink variants, and its XQA decode kernel, as backends.

A FlashInfer wrapper holds pinned and device workspaces and a plan; wrappers are kept in a pool and lent to our plan
objects, so that planning a step allocates nothing after the first. All wrappers of a device share one large workspace:
launches on one stream run one after the other.

Decode over FA2 is its paged prefill with one query per sequence (FlashInfer's CUDA-core decode drops the sink). XQA
reads lengths and page table on the device and needs no plan at all.
"""
from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch

from gptoss_kernels.attention.backends import flashinfer_obstacle, register_plan, xqa_obstacle
from gptoss_kernels.attention.flashinfer_jit import (
    build_obstacle,
    ensure_built,
    prepare,
    sink_arguments,
    sink_spec,
    xqa_spec,
)
from gptoss_kernels.attention.layer import AttentionError, LayerKind
from gptoss_kernels.attention.sinks import rescale_by_sink

WORKSPACE_BYTES = 384 * 2**20
XQA_SEMAPHORE_BYTES = 8 * 2**20
XQA_SCRATCH_BYTES = 248 * 2**20
LN2 = math.log(2.0)


@functools.cache
def workspace(device: torch.device, purpose: str) -> torch.Tensor:
    """One buffer per device and purpose; XQA's semaphores start at zero and each launch leaves them there."""
    size = XQA_SEMAPHORE_BYTES + XQA_SCRATCH_BYTES if purpose == "xqa" else WORKSPACE_BYTES
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _fa2_obstacle(**needs: Any) -> str | None:
    return flashinfer_obstacle(**needs) or build_obstacle(lambda: sink_spec("fa2", needs["layer"]))


def _fa3_obstacle(**needs: Any) -> str | None:
    return flashinfer_obstacle(**needs) or build_obstacle(lambda: sink_spec("fa3", needs["layer"]))


def _xqa_obstacle(**needs: Any) -> str | None:
    return xqa_obstacle(**needs) or build_obstacle(lambda: xqa_spec(needs["layer"], needs["page_size"]))


def _built_arguments(template: str, layer: LayerKind) -> tuple[list[Any], dict[str, Any]]:
    """jit_args and jit_kwargs of our variant, after making sure that it is built."""
    ensure_built(sink_spec(template, layer))
    return sink_arguments(template, layer)


_POOL: dict[tuple[Any, ...], list[Any]] = {}
_PLANNED: weakref.WeakKeyDictionary[Any, torch.cuda.Event] = weakref.WeakKeyDictionary()


def _borrow(owner: object, key: tuple[Any, ...], make: Any) -> Any:
    """A wrapper of this kind that no living plan uses; it goes back when `owner` is collected."""
    free = _POOL.setdefault(key, [])
    wrapper = free.pop() if free else make()
    weakref.finalize(owner, free.append, wrapper)
    return wrapper


def _plan(wrapper: Any, *arguments: Any, **keywords: Any) -> None:
    """Plan a wrapper. It stages in one pinned buffer, so first wait until the last plan has been copied from there."""
    if wrapper in _PLANNED:
        _PLANNED[wrapper].synchronize()
    wrapper.plan(*arguments, **keywords)
    _PLANNED[wrapper] = torch.cuda.Event()
    _PLANNED[wrapper].record(torch.cuda.current_stream(wrapper.device))


class _Sinks:
    """How a FlashInfer variant is handed the sinks, and the LSE that was asked for."""

    def __init__(self, template: str, layer: LayerKind, lse: str | None) -> None:
        self._scale, self._lse = layer.softmax_scale, lse
        self._afterwards = template == "fa2" and lse == "without_sink"   # FA2's LSE always includes the sink

    def run(self, wrapper: Any, tensors: tuple[Any, ...], sinks: torch.Tensor, out: torch.Tensor):
        given = torch.full_like(sinks, -torch.inf) if self._afterwards else sinks
        bits = 8 * given.element_size()
        extra = (given, self._scale, bits, int(self._lse != "without_sink"))
        if self._lse is None:
            return wrapper.run(*tensors, *extra, out=out)
        out, lse = wrapper.run(*tensors, *extra, out=out, return_lse=True)
        lse = lse.mul_(LN2)                                              # FlashInfer's LSE is in units of log2
        return (rescale_by_sink(out, lse, sinks), lse) if self._afterwards else (out, lse)


class _RaggedPrefill:
    """Ragged prefill; subclasses name the template."""

    template: str

    def __init__(self, layer: LayerKind, cu_q: torch.Tensor, cu_k: torch.Tensor, *, device, lse: str | None) -> None:
        self._sinks = _Sinks(self.template, layer, lse)
        if int(cu_q[-1]) == 0:
            return                                                       # nothing to plan; such a run launches nothing
        arguments, keywords = _built_arguments(self.template, layer)
        self._wrapper = _borrow(self, ("ragged", self.template, layer, device),
                                lambda: self._make(device, arguments, keywords))
        _plan(self._wrapper, cu_q.int(), cu_k.int(), layer.num_heads, layer.num_kv_heads, layer.head_dim, causal=True,
              window_left=layer.window_left, sm_scale=layer.softmax_scale, q_data_type=layer.dtype,
              kv_data_type=layer.dtype)

    def _make(self, device: torch.device, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        return BatchPrefillWithRaggedKVCacheWrapper(workspace(device, "prefill"), kv_layout="NHD",
                                                    backend=self.template, jit_args=arguments, jit_kwargs=keywords)

    def __call__(self, q, k, v, sinks, out):
        return self._sinks.run(self._wrapper, (q, k, v), sinks, out)


class _PagedPrefill:
    """Prefill over a paged cache; subclasses name the template."""

    template: str

    def __init__(self, layer, cu_q, kv_lens, page_table, *, page_size: int, device, lse: str | None) -> None:
        self._sinks = _Sinks(self.template, layer, lse)
        if int(cu_q[-1]) == 0:
            return
        arguments, keywords = _built_arguments(self.template, layer)
        self._wrapper = _borrow(self, ("paged", self.template, layer, device),
                                lambda: _paged_wrapper(self.template, device, arguments, keywords))
        plan_pages(self._wrapper, layer, cu_q, kv_lens, page_table, page_size)

    def __call__(self, q, k_pages, v_pages, sinks, out):
        return self._sinks.run(self._wrapper, (q, (k_pages, v_pages)), sinks, out)


def _paged_wrapper(template: str, device: torch.device, arguments: list[Any], keywords: dict[str, Any], **graph: Any):
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace(device, "prefill"), kv_layout="NHD", backend=template,
                                               jit_args=arguments, jit_kwargs=keywords, **graph)


def plan_pages(wrapper: Any, layer: LayerKind, cu_q, kv_lens, page_table: torch.Tensor, page_size: int) -> None:
    """Plan a paged wrapper: a page table [B, pages] becomes FlashInfer's list of used pages and last-page lengths."""
    lens = kv_lens.to("cpu", torch.int64)
    used = (lens + page_size - 1) // page_size
    columns = torch.arange(page_table.shape[1])
    indices = page_table[(columns[None, :] < used[:, None]).to(page_table.device)]
    indptr = torch.zeros(lens.numel() + 1, dtype=torch.int32)
    indptr[1:] = used.cumsum(0)
    last = ((lens - 1) % page_size + 1).int()
    _plan(wrapper, cu_q.int(), indptr, indices.int(), last, layer.num_heads, layer.num_kv_heads, layer.head_dim,
          page_size, causal=True, window_left=layer.window_left, sm_scale=layer.softmax_scale,
          q_data_type=layer.dtype, kv_data_type=layer.dtype)


@register_plan("attention.prefill", "flashinfer-fa2", _fa2_obstacle)
class FA2Prefill(_RaggedPrefill):
    """Ragged prefill with FlashInfer's FA2 template and our sink variant."""

    template = "fa2"


@register_plan("attention.prefill", "flashinfer-fa3", _fa3_obstacle)
class FA3Prefill(_RaggedPrefill):
    """Ragged prefill with FlashInfer's FA3 template and our sink variant."""

    template = "fa3"


@register_plan("attention.paged_prefill", "flashinfer-fa2", _fa2_obstacle)
class FA2PagedPrefill(_PagedPrefill):
    """Paged prefill with FlashInfer's FA2 template and our sink variant."""

    template = "fa2"


@register_plan("attention.paged_prefill", "flashinfer-fa3", _fa3_obstacle)
class FA3PagedPrefill(_PagedPrefill):
    """Paged prefill with FlashInfer's FA3 template and our sink variant."""

    template = "fa3"


@register_plan("attention.paged_decode", "flashinfer-fa2", _fa2_obstacle)
class FA2PagedDecode:
    """Decode as FA2 paged prefill of one query per sequence, in FlashInfer's CUDA-graph mode: fixed batch and buffers.

    `step` needs the lengths on the host, because FlashInfer plans there how to split the keys.
    """

    def __init__(self, layer: LayerKind, kv_lens, page_table, *, page_size: int, lse: str | None) -> None:
        self._layer, self._page_size = layer, page_size
        self._sinks = _Sinks("fa2", layer, lse)
        self._cu_q = torch.arange(kv_lens.numel() + 1, dtype=torch.int32)
        arguments, keywords = _built_arguments("fa2", layer)
        buffers = {
            "use_cuda_graph": True, "qo_indptr_buf": torch.zeros(kv_lens.numel() + 1, dtype=torch.int32),
            "paged_kv_indptr_buf": torch.zeros(kv_lens.numel() + 1, dtype=torch.int32),
            "paged_kv_indices_buf": torch.zeros(page_table.numel(), dtype=torch.int32),
            "paged_kv_last_page_len_buf": torch.ones(kv_lens.numel(), dtype=torch.int32),
        }
        on_device = {k: v.to(kv_lens.device) if torch.is_tensor(v) else v for k, v in buffers.items()}
        self._wrapper = _paged_wrapper("fa2", kv_lens.device, arguments, keywords, **on_device)

    def step(self, kv_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Plan this step's split of the keys (on the host; waits for lengths that are on the GPU)."""
        plan_pages(self._wrapper, self._layer, self._cu_q, kv_lens, page_table, self._page_size)

    def __call__(self, q, k_pages, v_pages, sinks, out):
        return self._sinks.run(self._wrapper, (q, (k_pages, v_pages)), sinks, out)


@register_plan("attention.paged_decode", "xqa", _xqa_obstacle)
class XQAPagedDecode:
    """Decode with FlashInfer's XQA kernel; reads lengths and pages on the device, so a step only fills buffers."""

    def __init__(self, layer: LayerKind, kv_lens, page_table, *, page_size: int, lse: str | None) -> None:
        ensure_built(xqa_spec(layer, page_size))
        self._layer, self._lens, self._table = layer, kv_lens, page_table
        self._capacity = page_table.shape[1] * page_size

    def step(self, kv_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Nothing to prepare: the kernel reads the plan's buffers. AttentionError for a sequence without a token."""
        if kv_lens.device.type == "cpu" and int(kv_lens.min()) < 1:
            raise AttentionError(f"kv_lens is {kv_lens.tolist()}; xqa needs at least 1 token in every sequence")

    def __call__(self, q, k_pages, v_pages, sinks, out):
        prepare()
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        layer = self._layer
        return xqa_batch_decode_with_kv_cache(
            q, (k_pages, v_pages), workspace(q.device, "xqa"), self._table, self._lens, self._capacity,
            layer.softmax_scale, 1.0, layer.window_left, out=out, sinks=sinks.float(), kv_layout="NHD",
        )
