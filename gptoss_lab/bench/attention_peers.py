"""What attention with sinks is compared with: FlashInfer's ready-made sink variant, and FlashInfer without any sink.

The ready-made variant is run as FlashInfer ships it (`AttentionSink`, fp32 sinks, no LSE); the kernels without sinks
are FlashInfer's default ones. Both are built by its JIT like ours. Peers that are not installed are left out.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

STOCK, PLAIN = "AttentionSink", "without sinks"


def peers(case: Any, given: Any, build: bool) -> tuple[dict[str, tuple[Callable[[], Any], Any]], dict[str, str]]:
    """(run() and the sinks it applies, by name; why others are missing) for a prefill. Decode has its peers in itself.

    build: compile modules that are not built yet, which takes minutes; else they are missing.
    """
    if case.form == "decode" or importlib.util.find_spec("flashinfer") is None:
        return {}, {}
    from gptoss_kernels.attention.backends import flashinfer_obstacle
    from gptoss_kernels.attention.flashinfer_jit import ensure_built

    if flashinfer_obstacle(layer=case.layer, device=torch.device("cuda")) is not None:
        return {}, {}
    template = "fa3" if case.window is None else "fa2"         # the faster one for the kind of layer
    found, missing = {}, {}
    for kind, module, sinks in ((STOCK, _stock, given.sinks), (PLAIN, _plain, None)):
        spec, start = module(case, given, template)
        if build or spec.is_compiled:
            ensure_built(spec)
            found[f"flashinfer-{template} {kind}"] = (start(), sinks)
        else:
            missing[f"flashinfer-{template} {kind}"] = "its module is not built"
    return found, missing


def peer_of(name: str, readings: Mapping[str, Any]) -> str | None:
    """The run a row is set beside: FlashInfer's ready-made variant in prefill, XQA in decode, for XQA its bare self."""
    if name.endswith(STOCK):
        return None
    if name.endswith(PLAIN):
        with_sinks = name.removesuffix(f" {PLAIN}")
        return with_sinks if with_sinks in readings else None
    kernel = name.removeprefix("auto (").removesuffix(")")
    wanted = (f"{kernel} {STOCK}", f"flashinfer-fa3 {STOCK}", f"flashinfer-fa2 {STOCK}", "xqa", f"{kernel} {PLAIN}")
    return next((peer for peer in wanted if peer in readings and peer != kernel), None)


def _wrapper(case: Any, given: Any, template: str, **jit: Any) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

    from gptoss_kernels.attention.flashinfer_backend import workspace

    kind = BatchPrefillWithRaggedKVCacheWrapper if case.form == "prefill" else BatchPrefillWithPagedKVCacheWrapper
    return kind(workspace(given.q.device, "prefill"), kv_layout="NHD", backend=template, **jit)


def _plan(case: Any, given: Any, wrapper: Any) -> None:
    from gptoss_kernels.attention.flashinfer_backend import plan_pages

    n, cu_q = case.layer, torch.tensor([0, case.q_len], dtype=torch.int32)
    if case.form == "prefill":
        wrapper.plan(cu_q, cu_q, n.num_heads, n.num_kv_heads, n.head_dim, causal=True, window_left=n.window_left,
                     sm_scale=n.softmax_scale, q_data_type=n.dtype, kv_data_type=n.dtype)
    else:
        plan_pages(wrapper, n, cu_q, given.kv_lens, given.page_table, case.page_size)


def _tensors(case: Any, given: Any) -> tuple[Any, ...]:
    return (given.q, *given.keys) if case.form == "prefill" else (given.q, tuple(given.keys))


def _stock(case: Any, given: Any, template: str) -> tuple[Any, Callable[[], Callable[[], Any]]]:
    """FlashInfer's own AttentionSink variant: its JitSpec, and what makes the run once that is built."""
    from gptoss_kernels.attention.flashinfer_jit import prepare

    prepare()
    from flashinfer.jit.attention import gen_customize_batch_prefill_module
    from flashinfer.jit.attention.variants import attention_sink_decl

    n = case.layer
    windowed = template == "fa2" or n.window is not None
    arguments = [f"stock_sink_bf16_h{n.head_dim}_swa{int(windowed)}_{template}", n.dtype, n.dtype, n.dtype, torch.int32,
                 n.head_dim, n.head_dim, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink",
                 attention_sink_decl[template]]
    keywords = {"use_sliding_window": windowed}

    def start() -> Callable[[], Any]:
        wrapper = _wrapper(case, given, template, jit_args=arguments, jit_kwargs=keywords)
        _plan(case, given, wrapper)
        return lambda: wrapper.run(*_tensors(case, given), given.sinks, n.softmax_scale, out=given.out)

    return gen_customize_batch_prefill_module(template, *arguments, **keywords), start


def _plain(case: Any, given: Any, template: str) -> tuple[Any, Callable[[], Callable[[], Any]]]:
    """FlashInfer's default kernel, without any sink, in the same form."""
    from gptoss_kernels.attention.flashinfer_jit import prepare

    prepare()
    from flashinfer.jit.attention import gen_batch_prefill_module

    n = case.layer
    spec = gen_batch_prefill_module(template, n.dtype, n.dtype, n.dtype, torch.int32, n.head_dim, n.head_dim, 0,
                                    n.window is not None, False, False)

    def start() -> Callable[[], Any]:
        wrapper = _wrapper(case, given, template)
        _plan(case, given, wrapper)
        return lambda: wrapper.run(*_tensors(case, given), out=given.out)

    return spec, start
