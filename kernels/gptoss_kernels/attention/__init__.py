"""Attention with sinks: ragged prefill, chunked prefill and decode over a paged cache.

    from gptoss_kernels.attention import LayerKind, Prefill
    plan = Prefill(LayerKind(64, 8, 64, window=128), cu_seqlens, device="cuda")    # once per step and kind of layer
    print(plan.choice.backend, plan.choice.reason)
    out = plan.run(q, k, v, sinks)                                                 # once per layer
"""
from gptoss_kernels.attention import flashinfer_backend, gluon_backend, reference_backend, triton_backend
from gptoss_kernels.attention.layer import AttentionError, LayerKind
from gptoss_kernels.attention.operation import (
    PagedDecode,
    PagedPrefill,
    Prefill,
    paged_decode,
    paged_prefill,
    prefill,
)

__all__ = [
    "AttentionError", "LayerKind", "PagedDecode", "PagedPrefill", "Prefill", "paged_decode", "paged_prefill", "prefill",
]
BACKEND_MODULES = (flashinfer_backend, gluon_backend, reference_backend, triton_backend)     # each registers itself
