"""Building FlashInfer's modules: find the toolchain, say what compiles and where it is kept, build it once.

FlashInfer compiles a module the first time it is used, in silence: the FA3 ones take minutes. Here every build is
announced on stderr with its cache folder and timed. A later process finds the module in the cache and only loads it.

What a build needs and a plain machine may lack: `CUDA_HOME` (FlashInfer takes the folder of `which nvcc`, which is
wrong where that is a link), `curand_kernel.h` (in the wheels torch brings) and a `libcuda.so` to link. `prepare` sets
these in the environment, for what the user has not set, before FlashInfer is imported.
"""
from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.attention import flashinfer_variants as variants
from gptoss_kernels.attention.layer import DTYPES, LayerKind
from gptoss_kernels.registry import BackendUnavailable

MEMORY_PER_COMPILE = 4 * 2**30          # one FA3 file takes 3.3 GB of host memory to compile


@functools.cache
def prepare() -> None:
    """Point FlashInfer's JIT to this machine's toolchain. Called once, before FlashInfer is imported."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    nvcc = shutil.which("nvcc")
    if nvcc and not ({"CUDA_HOME", "CUDA_PATH"} & os.environ.keys()):
        os.environ["CUDA_HOME"] = str(Path(nvcc).resolve().parent.parent)
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    if not (home / "include" / "curand_kernel.h").exists():
        _append("FLASHINFER_EXTRA_CUDAFLAGS", *(f"-isystem {d}" for d in _wheel_folders("include/curand_kernel.h")))
    folder = _link_folder()
    if folder:
        _append("FLASHINFER_EXTRA_LDFLAGS", f"-L{folder}")


def _append(variable: str, *flags: str) -> None:
    os.environ[variable] = " ".join([os.environ.get(variable, ""), *flags]).strip()


def _wheel_folders(header: str) -> list[Path]:
    """Folders of NVIDIA's wheels beside torch that hold a header."""
    root = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return sorted(hit.parent for hit in root.glob(f"*/{header}"))[:1]


def _link_folder() -> Path | None:
    """A folder with a `libcuda.so` to link against where only the driver's libcuda.so.1 is installed."""
    places = ["/usr/local/cuda/lib64/stubs", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    if any(Path(p, "libcuda.so").exists() for p in places):
        return None
    for place in (*places, "/usr/local/nvidia/lib64"):
        driver = Path(place, "libcuda.so.1")
        if driver.exists():
            folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "gptoss_kernels", "lib")
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "libcuda.so").exists():
                (folder / "libcuda.so").symlink_to(driver)
            return folder
    return None


def sink_arguments(template: str, layer: LayerKind) -> tuple[list[Any], dict[str, Any]]:
    """What FlashInfer's wrappers take as jit_args and jit_kwargs for our variant of "fa2" or "fa3"."""
    windowed = template == "fa2" or layer.window is not None
    name = variants.module_name(template, DTYPES[layer.dtype], layer.head_dim, windowed)
    variant, source = variants.SOURCES[template]
    arguments = [name, layer.dtype, layer.dtype, layer.dtype, torch.int32, layer.head_dim, layer.head_dim,
                 *variants.EXTRA_TENSORS, *variants.EXTRA_SCALARS, variant, source]
    return arguments, {"use_sliding_window": windowed}


def sink_spec(template: str, layer: LayerKind) -> Any:
    """FlashInfer's JitSpec of our variant; making it writes sources to the cache and compiles nothing."""
    prepare()
    from flashinfer.jit.attention import gen_customize_batch_prefill_module

    arguments, keywords = sink_arguments(template, layer)
    return gen_customize_batch_prefill_module(template, *arguments, **keywords)


def xqa_spec(layer: LayerKind, page_size: int) -> Any:
    """FlashInfer's JitSpec of XQA for this kind of layer and page size."""
    prepare()
    from flashinfer.jit.xqa import gen_xqa_module

    return gen_xqa_module(layer.dtype, layer.dtype, page_size, layer.head_dim, layer.group, layer.window is not None,
                          layer.dtype, 1)


def build_obstacle(make_spec: Callable[[], Any]) -> str | None:
    """None if the module is built or can be; else which tool is missing. The spec is made only if it matters."""
    tool = _missing_tool()
    if tool is None or make_spec().is_compiled:
        return None
    return f"its module is not built yet and {tool} is not found"


def _missing_tool() -> str | None:
    prepare()
    if shutil.which("ninja") is None:
        return "ninja"
    return None if {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() else "nvcc (or CUDA_HOME)"


def ensure_built(spec: Any) -> None:
    """Build a FlashInfer JitSpec unless its library exists, and say so on stderr. BackendUnavailable if it fails."""
    if spec.is_compiled:
        return
    tool = _missing_tool()
    if tool is not None:
        raise BackendUnavailable(f"FlashInfer module {spec.name} is not built yet and {tool} is not found")
    os.environ.setdefault("MAX_JOBS", str(_compile_jobs()))
    _tell(f"compiling {spec.name} for this GPU, {len(spec.sources)} files, {os.environ['MAX_JOBS']} at a time (FA3: "
          f"about 45 s a file, FA2: 8 s); once, then kept in {spec.build_dir}")
    start = time.perf_counter()
    try:
        spec.build(verbose=False, need_lock=True)
    except (RuntimeError, subprocess.SubprocessError, OSError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)[-300:]]
        raise BackendUnavailable(f"FlashInfer module {spec.name} did not compile: {lines[0].strip()}") from error
    _tell(f"{spec.name} compiled in {time.perf_counter() - start:.0f} s")


def _compile_jobs() -> int:
    """As many compiles at a time as cores and free memory allow."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = 0
    return max(1, min(os.cpu_count() or 1, free // MEMORY_PER_COMPILE))


def _tell(message: str) -> None:
    print(f"gptoss_kernels: {message}", file=sys.stderr, flush=True)
