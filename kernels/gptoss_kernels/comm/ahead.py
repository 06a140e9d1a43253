"""The kernels compiled for Hopper on a machine without a GPU: registers, spills, and the instructions that matter."""
from __future__ import annotations

import triton

from gptoss_kernels.ahead import Resources, compile_kernel
from gptoss_kernels.comm.kernels import OPTIONS, one_shot_kernel, two_shot_kernel
from gptoss_kernels.comm.own_rows import HAND_OUT_BLOCK, hand_out_kernel, sum_rows_config, sum_rows_kernel

KERNELS = {"one_shot": one_shot_kernel, "two_shot": two_shot_kernel}
_ADDRESSES = ("parts_ptr", "sums_ptr", "flags_ptr", "values_ptr", "scales_ptr", "to_ids_ptr", "to_weights_ptr")


def compile_form(form: str, world: int, hidden: int = 2880, copy: bool = False, norm: bool = True,
                 rows: int = 1) -> Resources:
    """Compile one form for `world` ranks and bf16 rows of `hidden`. copy, norm, rows: see the kernels."""
    kernel = KERNELS[form]
    constants = {"H": hidden, "BLOCK_H": triton.next_power_of_2(hidden), "RANK": 0, "WORLD": world,
                 "LANES": max(2, triton.next_power_of_2(world)), "COPY": copy, "NORM": norm, **OPTIONS,
                 **({"ROWS": rows} if form == "one_shot" else {})}
    return compile_kernel(kernel, {**_types(kernel), "eps": "fp32"}, constants)


def compile_sum_rows(world: int, hidden: int = 2880, rows: int = 4096, norm: bool = True, **options: int) -> Resources:
    """Compile the sum of own rows, `rows` of them. options: instead of the config's."""
    constants = {"H": hidden, "RANK": 0, "WORLD": world, "LANES": max(2, triton.next_power_of_2(world)), "NORM": norm,
                 "MEET": norm, "EPS": 1e-5, **sum_rows_config(rows, world), **options}
    return compile_kernel(sum_rows_kernel, _types(sum_rows_kernel), constants, ["scale_stride"])


def compile_hand_out(world: int) -> Resources:
    """Compile the handing out of what the router chose."""
    return compile_kernel(hand_out_kernel, {**_types(hand_out_kernel), "ids_ptr": "*i32", "weights_ptr": "*fp32"}, {
        "RANK": 0, "WORLD": world, "LANES": max(2, triton.next_power_of_2(world)), "BLOCK": HAND_OUT_BLOCK,
        "num_warps": 4})


def _types(kernel: triton.JITFunction) -> dict[str, str]:
    return {name: f"*{_element(name)}" for name in kernel.arg_names if name.endswith("_ptr")}


def _element(name: str) -> str:
    if name in _ADDRESSES:
        return "i64"
    return {"meetings_ptr": "i32", "weight_ptr": "fp32", "gain_ptr": "fp32"}.get(name, "bf16")
