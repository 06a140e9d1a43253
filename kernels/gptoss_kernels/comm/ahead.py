"""The kernels compiled for Hopper on a machine without a GPU: registers, spills, and the instructions that matter."""
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gptoss_kernels.comm.kernels import OPTIONS, one_shot_kernel, two_shot_kernel

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = {"one_shot": one_shot_kernel, "two_shot": two_shot_kernel}
_ADDRESSES = ("parts_ptr", "sums_ptr", "flags_ptr")


@dataclass(frozen=True)
class Compiled:
    """registers and stack bytes a thread, threads a program, and the PTX text."""

    registers: int
    stack: int
    threads: int
    ptx: str


def compile_form(form: str, world: int, hidden: int = 2880, copy: bool = False, norm: bool = True) -> Compiled:
    """Compile one form for `world` ranks and bf16 rows of `hidden`. copy, norm: see the kernels."""
    kernel = KERNELS[form]
    constants = {"H": hidden, "BLOCK_H": triton.next_power_of_2(hidden), "RANK": 0, "WORLD": world,
                 "LANES": max(2, triton.next_power_of_2(world)), "COPY": copy, "NORM": norm}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            kind = "i64" if name in _ADDRESSES else "i32" if name == "meetings_ptr" else "bf16"
            signature[name] = f"*{'fp32' if name == 'weight_ptr' else kind}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=HOPPER, options=OPTIONS)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    return Compiled(registers, stack, 32 * OPTIONS["num_warps"], made.asm["ptx"])
