"""What the combine that norms as well is given when it is compiled for Hopper without a GPU (gptoss_kernels.ahead)."""
from __future__ import annotations

from gptoss_kernels.ahead import Resources, compile_kernel
from gptoss_kernels.moe.combine import _combine_norm_kernel, combine_norm_config


def compile_combine_norm(columns: int, top: int = 4) -> Resources:
    """bf16 rows of `top` experts, the residual, and the norm in e4m3, its scales column by column."""
    types = {"y_ptr": "*bf16", "row_of_ptr": "*i32", "weights_ptr": "*fp32", "residual_ptr": "*bf16",
             "ids_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "gain_ptr": "*fp32", "q_ptr": "*fp8e4nv",
             "scale_ptr": "*fp32"}
    return compile_kernel(_combine_norm_kernel, types, {
        "H": columns, "TOP": top, "RESIDUAL": True, "BIAS": False, "EPS": 1e-5, "scale_row_stride": 1,
        **combine_norm_config(columns)}, ("scale_group_stride",))
