"""The kernels compiled for Hopper on a machine without a GPU: registers, spills, and the instructions that matter."""
from __future__ import annotations

import triton

from gptoss_kernels.ahead import Resources, compile_kernel
from gptoss_kernels.comm.kernels import OPTIONS, one_shot_kernel, two_shot_kernel

KERNELS = {"one_shot": one_shot_kernel, "two_shot": two_shot_kernel}
_ADDRESSES = ("parts_ptr", "sums_ptr", "flags_ptr")


def compile_form(form: str, world: int, hidden: int = 2880, copy: bool = False, norm: bool = True,
                 rows: int = 1) -> Resources:
    """Compile one form for `world` ranks and bf16 rows of `hidden`. copy, norm, rows: see the kernels."""
    kernel = KERNELS[form]
    constants = {"H": hidden, "BLOCK_H": triton.next_power_of_2(hidden), "RANK": 0, "WORLD": world,
                 "LANES": max(2, triton.next_power_of_2(world)), "COPY": copy, "NORM": norm, **OPTIONS,
                 **({"ROWS": rows} if form == "one_shot" else {})}
    types = {name: f"*{_element(name)}" for name in kernel.arg_names if name.endswith("_ptr")}
    return compile_kernel(kernel, {**types, "eps": "fp32"}, constants)


def _element(name: str) -> str:
    if name in _ADDRESSES:
        return "i64"
    return {"meetings_ptr": "i32", "weight_ptr": "fp32"}.get(name, "bf16")
