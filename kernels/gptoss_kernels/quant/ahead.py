"""What the quantising kernels are given when they are compiled for Hopper without a GPU (gptoss_kernels.ahead)."""
from __future__ import annotations

from gptoss_kernels.ahead import Resources, compile_kernel
from gptoss_kernels.quant.norm_quant import _norm_quantise_kernel, norm_quantise_config
from gptoss_kernels.quant.place_rows import _place_rows_kernel, place_rows_config
from gptoss_kernels.quant.place_scales import _place_scales_kernel, place_scales_config
from gptoss_kernels.quant.swiglu_quant import _swiglu_quantise_kernel, swiglu_quantise_config

_OUT = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}


def compile_norm_quantise(tokens: int, columns: int, *, copies: int = 0) -> Resources:
    """RMSNorm and e4m3 of so many bf16 rows, each to `copies` places, or all in their order (0)."""
    types = {"x_ptr": "*bf16", "gain_ptr": "*bf16", "row_of_ptr": "*i32", **_OUT}
    return _compile(_norm_quantise_kernel, types, {
        "H": columns, "COPIES": max(1, copies), "NORM": True, "PLACED": copies > 0, "EPS": 1e-5,
        **norm_quantise_config(tokens, columns, copies > 0)})


def compile_swiglu_quantise(inner: int) -> Resources:
    """Bias, SwiGLU and e4m3 of bf16 rows of 2 * inner."""
    types = {"y_ptr": "*i32", "bias_ptr": "*i64", "row_expert_ptr": "*i32", **_OUT}
    return _compile(_swiglu_quantise_kernel, types, {
        "INNER": inner, "BIAS": True, "ALPHA": 1.702, "LIMIT": 7.0, **swiglu_quantise_config()})


def compile_place_rows(columns: int, copies: int = 4) -> Resources:
    """Rows in e4m3, both scales column by column, to `copies` places each."""
    types = {"q_ptr": "*i32", "scale_ptr": "*fp32", "row_of_ptr": "*i32", "out_ptr": "*i32", "out_scale_ptr": "*fp32"}
    return _compile(_place_rows_kernel, types, {
        "H": columns // 4, "COPIES": copies, "out_row_stride": 1, **place_rows_config(columns)})


def compile_place_scales(columns: int, *, by_row: bool) -> Resources:
    """Scales of rows of so many columns; by_row: those of a row side by side."""
    groups = -(-columns // 128)
    types = {"scale_ptr": "*fp32", "token_of_ptr": "*i32", "out_ptr": "*fp32"}
    given = {"COUNT": groups, "scale_group_stride" if by_row else "scale_row_stride": 1, **place_scales_config(groups)}
    return compile_kernel(_place_scales_kernel, types, given, ("out_group_stride",))


def _compile(kernel, types, given) -> Resources:
    strides = [name for name in ("scale_group_stride", "out_group_stride") if name in kernel.arg_names]
    return compile_kernel(kernel, types, {**given, "scale_row_stride": 1}, strides)
