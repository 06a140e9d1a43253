"""What a layer's small kernels are given when they are compiled for Hopper without a GPU (gptoss_kernels.ahead)."""
from __future__ import annotations

from collections.abc import Mapping

import triton

from gptoss_kernels.ahead import Resources, compile_kernel
from gptoss_kernels.moe import routing
from gptoss_kernels.projection.few import few_config, few_linear_kernel
from gptoss_kernels.projection.norm import norm_residual_config, norm_residual_kernel
from gptoss_kernels.rope.cache import rope_cache_kernel, rope_config

_BF16 = ("x_ptr", "bias_ptr", "normed_ptr", "shifted_ptr", "qkv", "q_out", "k_pages", "v_pages", "keys", "values",
         "router_ptr", "y_ptr", "residual_ptr")
_FP32 = ("gain_ptr", "cos", "sin", "key_scales", "value_scales", "logits_ptr", "weights_ptr", "scale_ptr")
_INT32 = ("positions", "slots", "rows", "ids_ptr", "real_ptr", "row_of_ptr", "token_of_ptr", "counts_ptr", "starts_ptr",
          "tile_expert_ptr", "tile_rows_ptr", "row_expert_ptr", "block_counts_ptr")


def compile_norm_residual(hidden: int, *, bias: bool = True) -> Resources:
    """RMSNorm of bf16 rows, with x + bias beside it or alone."""
    return _compile(norm_residual_kernel, {"H": hidden, "BIAS": bias, "EPS": 1e-5, **norm_residual_config(hidden)})


def compile_rope_cache(
    heads: int, kv_heads: int, head_dim: int, tokens: int, *, e4m3: bool = False, contiguous: bool = False,
    placed: bool = False,
) -> Resources:
    """RoPE and cache write of bf16 rows, as a prefill (tokens over 128) or a decode launches it."""
    pages = {"k_pages": "fp8e4nv", "v_pages": "fp8e4nv"} if e4m3 else {}
    return _compile(rope_cache_kernel, {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "E4M3": e4m3,
                                        "CONTIGUOUS": contiguous, "PLACED": placed,
                                        **rope_config(kv_heads, head_dim, tokens)}, pages)


def compile_few_linear(n: int, k: int, tokens: int, *, e4m3: bool, norm: bool) -> Resources:
    """The dense product of a few bf16 rows: QKV with its norm, or the output projection with its residual."""
    weight = {"w_ptr": "fp8e4nv" if e4m3 else "bf16", "bias_ptr": "fp32" if e4m3 else "bf16"}
    return _compile(few_linear_kernel, {"N": n, "K": k, "NORM": norm, "RESIDUAL": not norm, "E4M3": e4m3, "EPS": 1e-5,
                                        **few_config(tokens, n, e4m3)}, weight)


def compile_routing(experts: int, hidden: int, tokens: int) -> list[Resources]:
    """The launches of `route` for so many tokens, padding rows masked."""
    block_e = max(16, triton.next_power_of_2(experts))
    norm = {"H": hidden, "NORM": True, "EPS": 1e-5}
    choice = {"TOP": 4, "TOP_PAD": 4, "SOFTMAX_BEFORE": False, "ROUND_LOGITS": False, "MASKED": True,
              "BLOCK_E": block_e}
    place = {"TOP": 4, "BLOCK_E": block_e, "ALIGN": 16 if tokens <= 128 else 128, "BLOCK_TILES": 8}
    one, few = tokens <= routing.FEW_TOKENS, triton.next_power_of_2(tokens)
    logits = [_compile(routing._logits_kernel, {**norm, "QUANTISE": True, **routing.logits_config(tokens, hidden)},
                       {"q_ptr": "fp8e4nv"})] if one else []
    if tokens <= routing.ONE_PROGRAM:
        return [*logits, _compile(routing._choose_and_place_kernel, {
            **place, **choice, "BLOCK_T": few, "SLOTS": max(16, few * 4),
            "num_warps": 1 if tokens <= 2 else 4})]
    first = (_compile(routing._choose_one_kernel, {**choice, "num_warps": 1}) if one
             else _compile(routing._choose_kernel, {**norm, **choice, **routing.choose_config(tokens)}))
    block_t = 1 if one else routing.choose_config(tokens)["BLOCK_T"]
    place |= routing.place_config(block_t, place["TOP"])
    if triton.cdiv(tokens, block_t) <= routing.SCANNED_BLOCKS:
        return [*logits, first, _compile(routing._place_kernel, place)]
    del place["CHUNK"]
    return [*logits, first, _compile(routing._scan_kernel, {"BLOCK_E": block_e, **routing.scan_config()}),
            _compile(routing._place_scanned_kernel, place)]


def _compile(kernel: triton.JITFunction, given: Mapping[str, object], types: Mapping[str, str] | None = None
             ) -> Resources:
    """Compile with these constants and options; pointers by their names, everything else an int32."""
    pointers = {**dict.fromkeys(_BF16, "*bf16"), **dict.fromkeys(_FP32, "*fp32"), **dict.fromkeys(_INT32, "*i32"),
                **{name: f"*{element}" for name, element in (types or {}).items()}}
    return compile_kernel(kernel, pointers, given)
