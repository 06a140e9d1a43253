"""The grouped GEMM of the `cuda` backend: own kernels for Hopper, bias in the accumulator, SwiGLU fused into the first.

Why CUDA C++ and not Gluon: the kernel needs two CTAs that share one load (TMA multicast over a cluster), which Triton
3.6's Gluon cannot express (its copy takes no multicast, its barriers do not reach another CTA), and 192 accumulator
registers a thread beside their addresses without a spill; the measured Gluon form, without either, reached 84 to 95 %
of DeepGEMM. The kernel itself is `cuda/grouped_gemm.cu`.
"""
from __future__ import annotations

import functools

import torch

from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.quant.norm_quant import empty_scales

TILE_M = 128
TILE_COLUMNS = (128, 192, 256)
"""Widths of a bf16 tile that the kernel can be compiled for."""
CHOSEN_COLUMNS = 192
"""The widest that divides 2880 and 5760, the widths of gpt-oss's products."""


@functools.cache
def multiprocessors(device: int) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def obstacle(device: torch.device | str | None = None, **needs: object) -> str | None:
    """Why the CUDA kernels cannot run for these needs, or None."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU and tensors on it"
    if needs.get("dtype", torch.bfloat16) != torch.bfloat16:
        return f"it takes and gives torch.bfloat16; dtype is {needs['dtype']}"
    capability = torch.cuda.get_device_capability(torch.device(device))
    if capability != (9, 0):
        return f"it needs compute capability 9.0 (Hopper); this GPU has {capability[0]}.{capability[1]}"
    for axis in ("hidden_size", "intermediate_size"):
        size = needs.get(axis)
        if size is not None and size % 32:
            return f"it needs {axis} in multiples of 32; it is {size}"
    return driver.compiler_obstacle()


def gemm_defines(n: int, k: int, experts: int, *, swiglu: bool, bias: bool, alpha: float = 1.702,
                 limit: float = 7.0, columns: int | None = None, add: bool = False, gather: bool = False
                 ) -> tuple[tuple[str, object], ...]:
    """The compile-time constants of one specialisation of `grouped_gemm.cu`. columns, add: see `grouped_gemm`; gather:
    with its token_of."""
    tile = () if columns is None else (("TILE_COLUMNS", columns),)
    tile += (("ADD", 1),) if add else ()
    tile += (("GATHER", 1),) if gather else ()
    return (("N", n), ("K", k), ("EXPERTS", experts), ("EPILOGUE", int(swiglu)), ("HAS_BIAS", int(bias)),
            ("ALPHA", f"{float(alpha)!r}f"), ("LIMIT", f"{float(limit)!r}f"), *tile)


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    token_of: torch.Tensor | None = None,
    swiglu: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    columns: int | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[m] = bias[e] + a[m] . b[e]^T for every row m of expert e, rows of an expert aligned to 128.

    a: [M, K] float8_e4m3fn, M a multiple of 128. a_scale: [M, ceil(K/128)] fp32, column-major (`empty_scales`).
    b: [E, N, K] float8_e4m3fn. b_scale: [E, ceil(N/128), ceil(K/128)] fp32. bias: [E, N] fp32, or None.
    counts: [E] int32, on the device. N and K multiples of 32. columns: of a tile, one of TILE_COLUMNS,
    CHOSEN_COLUMNS by default; with `swiglu` always 256, one scale group of the result. out: where y goes, [rows, N]
    bf16, contiguous; fewer than M rows are its first ones. add: to what is there; the product is rounded before the
    sum is. Not with `swiglu`. token_of: [M] int32, with `swiglu`: row m is a[token_of[m]] (-1: padding), a then has any
    number of rows; a_scale is sorted already, [M, ...].
    Returns y [M, N] bf16; with `swiglu`, N's columns being gate and up in turn: h [M, N/2] float8_e4m3fn and its scale
    [M, ceil(N/256)] fp32, column-major. Padding rows of the result hold anything.
    """
    m = a.shape[0] if token_of is None else check_gathered(a, token_of, swiglu)
    check_operands(a, a_scale, b, b_scale, bias, counts, m)
    if swiglu and b.shape[1] % 128:
        raise ValueError(f"grouped_gemm: SwiGLU over {b.shape[1]} columns; a multiple of 128 is needed")
    columns = (256 if swiglu else CHOSEN_COLUMNS) if columns is None else columns
    if columns not in ((256,) if swiglu else TILE_COLUMNS):
        raise ValueError(f"grouped_gemm: tiles of {columns} columns; {256 if swiglu else '128, 192 or 256'} is needed")
    e, n, k = b.shape
    check_out(out, m, n, add, swiglu)
    device = a.device.index or 0
    kernel = _kernel(n, k, e, swiglu, bias is not None, alpha, limit, columns, add, token_of is not None, device)
    a_map = driver.tensor_map(a.data_ptr(), 1, a.shape[0], k, 64, 128)
    if swiglu:
        out = torch.empty(m, n // 2, dtype=torch.float8_e4m3fn, device=a.device)
        out_scale = empty_scales(m, n // 2, a.device)
        out_map = driver.tensor_map(out.data_ptr(), 1, m, n // 2, 16, 128)
        b_map = driver.interleaved_map(b.data_ptr(), e * n, k)
    else:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device) if out is None else out
        out_scale = a_scale                                             # passed, never written
        out_map = driver.tensor_map(out.data_ptr(), 2, out.shape[0], n, 8, 64)
        b_map = driver.tensor_map(b.data_ptr(), 1, e * n, k, columns // 2, 128)
    driver.launch(kernel, multiprocessors(device) // 2 * 2, 384, [
        a_map, b_map, out_map, a_scale, a_scale.stride(1), b_scale, b_scale if bias is None else bias, counts,
        out_scale, out_scale.stride(1), a, counts if token_of is None else token_of], overlapping=True)
    return (out, out_scale) if swiglu else out


@functools.cache
def _kernel(
    n: int, k: int, experts: int, swiglu: bool, bias: bool, alpha: float, limit: float, columns: int, add: bool,
    gather: bool, device: int,
) -> driver.Kernel:
    return driver.load("grouped_gemm.cu", "grouped_gemm", gemm_defines(
        n, k, experts, swiglu=swiglu, bias=bias, alpha=alpha, limit=limit, columns=columns, add=add, gather=gather),
        device)


def check_out(out: torch.Tensor | None, m: int, n: int, add: bool, swiglu: bool) -> None:
    """ValueError, one line, if a product of [m, n] cannot be written or added to `out`."""
    if swiglu and (out is not None or add):
        raise ValueError("grouped_gemm: with SwiGLU the result is new memory; out and add are for the plain product")
    if add and out is None:
        raise ValueError("grouped_gemm: add is given and out missing; out holds what is added to")
    if out is not None and (out.dim() != 2 or out.shape[0] > m or out.shape[1] != n or out.dtype != torch.bfloat16
                            or not out.is_contiguous()):
        raise ValueError(f"grouped_gemm: out is {out.dtype} {list(out.shape)}; contiguous bf16 of at most {[m, n]} is "
                         "needed")


def check_gathered(a: torch.Tensor, token_of: torch.Tensor, swiglu: bool) -> int:
    """How many rows `token_of` takes from a; ValueError, one line, if it cannot."""
    if not swiglu:
        raise ValueError("grouped_gemm: token_of is given without swiglu; only the product with SwiGLU gathers rows")
    if token_of.dim() != 1 or token_of.dtype != torch.int32 or not token_of.is_contiguous():
        raise ValueError(f"grouped_gemm: token_of is {token_of.dtype} {list(token_of.shape)}; contiguous int32 [M] is "
                         "needed")
    if a.numel() >= 2**31:
        raise ValueError(f"grouped_gemm: rows of a {list(a.shape)} are gathered; fewer than 2^31 elements are needed")
    return token_of.shape[0]


def check_operands(a, a_scale, b, b_scale, bias, counts, m=None) -> None:
    """ValueError, one line, if the operands of a grouped GEMM of m rows (default: all of a) do not fit together."""
    m, k = a.shape[0] if m is None else m, a.shape[1]
    e, n, bk = b.shape
    if bk != k or k % 32 or n % 32:
        raise ValueError(f"grouped_gemm: a {list(a.shape)}, b {[e, n, bk]}; equal K and multiples of 32 are needed")
    if m % TILE_M:
        raise ValueError(f"grouped_gemm: a has {m} rows; a multiple of {TILE_M} is needed")
    if {a.dtype, b.dtype} != {torch.float8_e4m3fn} or not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"grouped_gemm: a is {a.dtype} and b {b.dtype}; both contiguous float8_e4m3fn are needed")
    groups = -(-k // 128)
    column_major = a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0
    if a_scale.shape != (m, groups) or a_scale.dtype != torch.float32 or not column_major:
        raise ValueError(f"grouped_gemm: a_scale is {a_scale.dtype} {list(a_scale.shape)} with strides "
                         f"{list(a_scale.stride())}; fp32 {[m, groups]}, column-major, is needed")
    if b_scale.shape != (e, -(-n // 128), groups) or b_scale.dtype != torch.float32 or not b_scale.is_contiguous():
        raise ValueError(f"grouped_gemm: b_scale is {b_scale.dtype} {list(b_scale.shape)}; contiguous fp32 "
                         f"{[e, -(-n // 128), groups]} is needed")
    if bias is not None and (bias.shape != (e, n) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"grouped_gemm: bias is {bias.dtype} {list(bias.shape)}; contiguous fp32 {[e, n]} is needed")
    if counts.shape != (e,) or counts.dtype != torch.int32:
        raise ValueError(f"grouped_gemm: counts is {counts.dtype} {list(counts.shape)}; int32 {[e]} is needed")
