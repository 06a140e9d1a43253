"""Compile Triton and Gluon kernels for Hopper on a machine without a GPU, and read what the compiler reports.

Registers, spills, shared memory and the instructions used answer most questions about a kernel before it ever runs, and
a test that compiles keeps GPU sources from rotting where no GPU is. Each room says in its own ahead.py what its kernels
are given; how that is compiled and read is here.
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers and stack bytes a thread, shared bytes a block, threads a block, wgmma
    instructions; and its PTX."""

    registers: int
    stack: int
    shared: int
    threads: int
    wgmma: int
    ptx: str = field(repr=False)


def compile_kernel(
    kernel: triton.JITFunction, types: Mapping[str, str], given: Mapping[str, object], aligned: Iterable[str] = (),
) -> Resources:
    """Compile a Triton kernel.

    types: argument -> type, such as "*bf16"; i32 for those not named. given: as at a launch, the constexpr arguments
    (without those that shall have their defaults) and LAUNCH_OPTIONS. Pointers are taken to be multiples of 16 bytes,
    and so are the integers named in `aligned`.
    """
    options = {name: value for name, value in given.items() if name in LAUNCH_OPTIONS}
    constants = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constants |= {name: value for name, value in given.items() if name not in LAUNCH_OPTIONS}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or (name in aligned and name not in constants):
            attributes[(index,)] = ALIGNED
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return resources(triton.compile(source, target=HOPPER, options=options))


def resources(compiled: triton.compiler.CompiledKernel) -> Resources:
    """Read off the machine code of a compiled kernel what it takes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    ptx = compiled.asm["ptx"]
    wgmma = len(re.findall(r"wgmma\.mma_async", ptx))
    return Resources(registers, stack, compiled.metadata.shared, 32 * compiled.metadata.num_warps, wgmma, ptx)
