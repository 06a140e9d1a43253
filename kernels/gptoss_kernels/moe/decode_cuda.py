"""The decode form of the grouped GEMM (`cuda/decode_gemm.cu`): reads the weights of the experts that were hit, once.

For 1 to 128 tokens an expert has a handful of rows and its weights are the cost; tiles are 16 rows. Two weight forms:
e4m3 in 128x128 blocks, and MXFP4 as released, decoded in registers, which reads 0.53 of the bytes. Rows may be
gathered (`gather`): the first product reads each token's one quantised row wherever its experts are.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.moe.routing import Routing
from gptoss_kernels.quant.norm_quant import empty_scales
from gptoss_kernels.reference.experts import ExpertMatrices

TILE = 16
FORMS = {"fp8": 0, "mxfp4": 1}


@dataclass(frozen=True)
class Tuning:
    """How `decode_gemm.cu` is compiled: warpgroups that multiply (2, or for MXFP4 4), narrow products for at most eight
    tokens, and whether what can be is prepared before the kernel in front has ended."""

    warpgroups: int = 2
    narrow: bool = False
    prepared: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA: the multiplying warpgroups and a warp that loads, or beside four of them a warpgroup."""
        return 288 if self.warpgroups == 2 else 640


TUNED = {"fp8": Tuning(), "mxfp4": Tuning(4, narrow=True, prepared=True)}
"""The chosen tuning of each weight form."""


def decode_defines(n: int, k: int, form: str, *, swiglu: bool, alpha: float = 1.702, limit: float = 7.0,
                   tuning: Tuning | None = None) -> tuple[tuple[str, object], ...]:
    """The compile-time constants of one specialisation of `decode_gemm.cu`. tuning: by default the form's of TUNED."""
    chosen = tuning or TUNED[form]
    return (("N", n), ("K", k), ("FORM", FORMS[form]), ("EPILOGUE", int(swiglu)), ("ALPHA", f"{float(alpha)!r}f"),
            ("LIMIT", f"{float(limit)!r}f"), ("WARPGROUPS", chosen.warpgroups), ("NARROW", int(chosen.narrow)),
            ("PREPARED", int(chosen.prepared)))


def decode_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    matrices: ExpertMatrices,
    bias: torch.Tensor,
    routing: Routing,
    *,
    gather: bool = False,
    overlapping: bool = False,
    swiglu: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[row] = bias[e] + x[row] . w[e]^T for every placed row.

    x: [rows, K] float8_e4m3fn, row r of the sorted buffer, or with `gather` [T, K] by token. x_scale: [.., ceil(K/128)]
    fp32, any strides. matrices: E of [N, K], "fp8" or "mxfp4". bias: [E, N] fp32. routing: with align 16.
    overlapping: may start before the kernel launched last has ended; without `swiglu` its weights are then asked for at
    once, and that kernel must not be what wrote `routing`.
    K a multiple of 64 up to 4096, N of 64. Returns y [rows, N] bf16, or with `swiglu` h [rows, N/2] e4m3 and its scale
    [rows, ceil(N/256)] fp32. Padding rows of the result hold anything.
    """
    values, scales = matrices.values, matrices.scales
    e, n = values.shape[:2]
    k = x.shape[1]
    if matrices.form not in FORMS:
        raise ValueError(f"decode_gemm: weights have form {matrices.form!r}; 'fp8' or 'mxfp4' is needed")
    row_bytes = k if matrices.form == "fp8" else k // 2
    if k % 64 or n % 64 or k > 4096 or values.numel() != e * n * row_bytes:
        raise ValueError(f"decode_gemm: rows of {k} for weights {list(values.shape)} ({matrices.form}); equal K, "
                         "K and N multiples of 64 and K up to 4096 are needed")
    if routing.align != TILE:
        raise ValueError(f"decode_gemm: rows are aligned to {routing.align}; {TILE} is needed")
    if bias.shape != (e, n) or bias.dtype != torch.float32 or x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"decode_gemm: bias is {bias.dtype} {list(bias.shape)} and x {x.dtype}; fp32 {[e, n]} and "
                         "float8_e4m3fn are needed")
    if not (x.is_contiguous() and values.is_contiguous() and scales.is_contiguous() and bias.is_contiguous()):
        raise ValueError("decode_gemm: x, weights, scales and bias must be contiguous; one of them is not")
    if scales.data_ptr() % 16 or bias.data_ptr() % 16:
        raise ValueError("decode_gemm: scales or bias do not begin at a multiple of 16 bytes; both must")
    device = x.device.index or 0
    kernel = _kernel(n, k, matrices.form, swiglu, alpha, limit, device)
    rows, out_scale = routing.rows, x_scale                             # passed, not written without swiglu
    if swiglu:
        out = torch.empty(rows, n // 2, dtype=torch.float8_e4m3fn, device=x.device)
        out_scale = empty_scales(rows, n // 2, x.device)
    else:
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    driver.launch(kernel, gemm_cuda.multiprocessors(device), TUNED[matrices.form].threads, [
        driver.tensor_map(values.data_ptr(), 1, e * n, row_bytes, 64, 128, fetch=128), x, x_scale, *x_scale.stride(),
        routing.token_of if gather else 0, scales, bias, routing.tile_expert, routing.tile_rows,
        routing.tile_expert.shape[0], out, out_scale, out_scale.stride(1)], overlapping)
    return (out, out_scale) if swiglu else out


@functools.cache
def _kernel(n: int, k: int, form: str, swiglu: bool, alpha: float, limit: float, device: int) -> driver.Kernel:
    return driver.load("decode_gemm.cu", "decode_gemm", decode_defines(n, k, form, swiglu=swiglu, alpha=alpha,
                                                                       limit=limit), device)
