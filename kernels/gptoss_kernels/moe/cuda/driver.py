"""From a .cu file to a launch, with nothing but the CUDA driver and NVRTC: no build step, no C++ extension.

The kernels are specialised at compile time (N, K, number of experts), so they are compiled when first asked for and the
machine code is kept under $XDG_CACHE_HOME/gptoss_kernels, named by a hash of everything that went in. NVRTC is among
torch's own libraries; where it is not found, nvcc on the PATH does the same (and does it without a GPU, which is how
registers and spills are checked). Launches go to torch's current stream and can be captured in a CUDA graph.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
HEADERS = ("hopper.cuh", "few.cuh", "few_choice.cuh")
ARCHITECTURE = "sm_90a"


class CudaError(RuntimeError):
    """The driver, NVRTC or nvcc refused; the message says which call and why."""


@dataclass(frozen=True)
class Kernel:
    """A loaded function (its CUfunction), the dynamic shared memory it asks for, in bytes, and its device."""

    function: int
    shared_bytes: int
    device: int


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC from torch's wheels or the system; None if there is none."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    names += [str(p) for root in roots for p in sorted(Path(root).glob("**/libnvrtc.so.*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _driver() -> ctypes.CDLL:
    lib, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    lib.cuLaunchKernel.argtypes = [pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer]
    lib.cuLaunchKernelEx.argtypes = [pointer] * 4
    return lib


def compiler_obstacle() -> str | None:
    """What keeps this machine from compiling the kernels, or None."""
    if _nvrtc() is None and shutil.which("nvcc") is None:
        return "neither NVRTC (nvidia-cuda-nvrtc, a part of torch for CUDA) nor nvcc was found"
    return None


def compile_cubin(source: str, defines: Mapping[str, object]) -> bytes:
    """Machine code for sm_90a of one of the .cu files here. defines: macros, in any order."""
    texts = {name: (HERE / name).read_text() for name in (source, *HEADERS)}
    key = hashlib.sha256(repr((ARCHITECTURE, sorted(texts.items()), sorted(defines.items()))).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gptoss_kernels"
    cached = root / f"{Path(source).stem}-{key[:32]}.cubin"
    if cached.exists():
        return cached.read_bytes()
    flags = ["-std=c++17", *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    code = _compile_nvrtc(source, texts, flags) if _nvrtc() else compile_nvcc(source, defines)[0]
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root, delete=False) as file:
        file.write(code)
    Path(file.name).replace(cached)
    return code


def _compile_nvrtc(source: str, texts: Mapping[str, str], flags: Sequence[str]) -> bytes:
    lib = _nvrtc()
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * len(HEADERS))(*(texts[h].encode() for h in HEADERS))
    names = (ctypes.c_char_p * len(HEADERS))(*(h.encode() for h in HEADERS))
    made = lib.nvrtcCreateProgram(ctypes.byref(program), texts[source].encode(), source.encode(), len(HEADERS), headers,
                                  names)
    if made != 0:
        raise CudaError(f"nvrtcCreateProgram: error {made} for {source}")
    options = [f"--gpu-architecture={ARCHITECTURE}", *flags]
    failed = lib.nvrtcCompileProgram(program, len(options),
                                     (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    if failed:
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC could not compile {source}: {log.value.decode(errors='replace').strip()}")
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, code)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def compile_nvcc(source: str, defines: Mapping[str, object]) -> tuple[bytes, dict[str, int]]:
    """The same with nvcc, and what it reports: registers, spill_stores and spill_loads in bytes. Needs no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        command = ["nvcc", "-cubin", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v",
                   *(f"-D{name}={value}" for name, value in sorted(defines.items())),
                   "-o", str(out), str(HERE / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CudaError(f"nvcc could not compile {source}: {done.stderr.strip()}")
        return out.read_bytes(), _resources(done.stderr)


def _resources(report: str) -> dict[str, int]:
    patterns = {"registers": r"Used (\d+) registers", "spill_stores": r"(\d+) bytes spill stores",
                "spill_loads": r"(\d+) bytes spill loads"}
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    if not all(found.values()):
        raise CudaError(f"nvcc's report has no register count: {report.strip()}")
    return {name: int(match.group(1)) for name, match in found.items()}


def _check(call: str, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise CudaError(f"{call}: {(text.value or b'unknown error').decode()} ({result})")


@functools.cache
def load(source: str, entry: str, defines: tuple[tuple[str, object], ...], device: int) -> Kernel:
    """Compile (or take from the cache) and load for one device; the kernel says how much shared memory it needs."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()                       # makes torch's context current
        code = compile_cubin(source, dict(defines))
        module, function, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        _check("cuModuleLoadData", _driver().cuModuleLoadData(ctypes.byref(module), code))
        _check("cuModuleGetFunction", _driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        size, value = ctypes.c_size_t(), ctypes.c_int()
        _check("cuModuleGetGlobal", _driver().cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module,
                                                                  f"{entry}_shared_bytes".encode()))
        _check("cuMemcpyDtoH", _driver().cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.c_size_t(4)))
        _check("cuFuncSetAttribute", _driver().cuFuncSetAttribute(function, 8, value.value))
        return Kernel(function.value, value.value, device)


class TensorMap(ctypes.Structure):
    """CUtensorMap: 128 bytes, at an address that is a multiple of 64 when it is made."""

    _fields_ = [("opaque", ctypes.c_uint8 * 128)]


@functools.lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, bytes_per_element: int, rows: int, columns: int, box_rows: int, box_columns: int, fetch: int = 256
) -> TensorMap:
    """A TMA map of a contiguous matrix [rows, columns] of 1-byte or 2-byte elements, boxes swizzled by 128 bytes.

    Elements outside read as zero and are not written. The row pitch must be a multiple of 16 bytes. fetch: the bytes,
    64, 128 or 256, that the L2 fetches where one of them is read.
    """
    pitch = columns * bytes_per_element
    return _encode(pointer, {1: 0, 2: 9}[bytes_per_element], (columns, rows), (pitch,), (box_columns, box_rows), fetch)


@functools.lru_cache(maxsize=4096)
def interleaved_map(pointer: int, rows: int, columns: int) -> TensorMap:
    """A TMA map of a byte matrix whose boxes, 128 rows of 128 bytes, hold the rows of each 32 in another order.

    Row 8 q + 2 j + s of 32 comes to place 8 j + 2 q + s (q, j < 4, s < 2): the dimensions of the map are the columns,
    s, q, j and the 32s, and a box is filled with s running fastest.
    """
    return _encode(pointer, 0, (columns, 2, 4, 4, rows // 32), (columns, 8 * columns, 2 * columns, 32 * columns),
                   (128, 2, 4, 4, 4))


def _encode(pointer: int, kind: int, sizes: Sequence[int], pitches: Sequence[int], box: Sequence[int],
            fetch: int = 256) -> TensorMap:
    """kind: CUtensorMapDataType (0: bytes, 9: bf16). pitches: bytes to the next element, from dimension 1 on."""
    if pointer % 16 or any(pitch % 16 for pitch in pitches):
        raise ValueError(f"tensor map: address {pointer:#x}, pitches {list(pitches)}; multiples of 16 bytes are needed")
    raw = (ctypes.c_uint8 * 192)()
    address = (ctypes.addressof(raw) + 63) // 64 * 64
    rank = len(sizes)
    _check("cuTensorMapEncodeTiled", _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), kind, rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, 3, {64: 1, 128: 2, 256: 3}[fetch], 0))
    return TensorMap.from_buffer_copy(ctypes.string_at(address, 128))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a union of 64 bytes of which the first integer is used here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)]


_OVERLAPPING = _Attribute(6, 0, (ctypes.c_int * 16)(1))     # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def launch(
    kernel: Kernel, blocks: int, threads: int, arguments: Sequence[torch.Tensor | TensorMap | int],
    overlapping: bool = False,
) -> None:
    """Launch on torch's current stream. arguments: tensors (their address is passed), TensorMaps, or integers of 4 or 8
    bytes, as the kernel declares them.

    overlapping: the kernel may start before the one in front of it has ended; it waits for it itself.
    """
    # An integer or an address lies in 8 bytes, the lowest first: who reads 4 of them finds what was meant.
    values = array("q", [a if isinstance(a, int) else 0 if isinstance(a, TensorMap) else a.data_ptr()
                         for a in arguments])
    begin = values.buffer_info()[0]
    pointers = array("q", [ctypes.addressof(a) if isinstance(a, TensorMap) else begin + 8 * n
                           for n, a in enumerate(arguments)])
    at, stream = pointers.buffer_info()[0], torch._C._cuda_getCurrentRawStream(kernel.device)
    if not overlapping:
        _check("cuLaunchKernel", _driver().cuLaunchKernel(
            kernel.function, blocks, 1, 1, threads, 1, 1, kernel.shared_bytes, stream, at, None))
        return
    config = _Config((blocks, 1, 1), (threads, 1, 1), kernel.shared_bytes, stream, ctypes.pointer(_OVERLAPPING), 1)
    _check("cuLaunchKernelEx", _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.function, at, None))
