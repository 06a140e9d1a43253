"""A dense product for a few tokens: the norm before it, its bias and the residual in the same launch.

    y = [residual +] bias + norm(x) . W^T            T <= 32, W in bf16 or in e4m3 128x128 blocks

What: in decode a projection is the reading of its weights, some 15 to 30 MB, and everything around it is launches of
two microseconds each. Here a program owns some rows of W and reads them once, front to back, for all tokens.

How: the norm costs no pass of its own. 1 / rms of a row is one number, so the sum of squares is gathered in the same
loop that multiplies x * gain by W, and the product is scaled at the end. That rounds x * gain to the activations' dtype
instead of x * gain / rms: the same relative error, at other places. e4m3 weights are widened to the activations' dtype
in registers, exactly; activations are not quantised here, so with e4m3 weights a decode step is nearer to the truth
than a prefill of the same tokens.

What is lost: each program reads all of x again, from L2. Above 32 tokens that costs as much as the weights.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.projection.backends import triton_obstacle
from gptoss_kernels.quant.rounding import INTERPRETED, operand, to_dtype
from gptoss_kernels.reference.fused import few_linear
from gptoss_kernels.registry import register

MOST_TOKENS = 32


@triton.jit
def few_linear_kernel(x_ptr, w_ptr, scale_ptr, bias_ptr, gain_ptr, residual_ptr, y_ptr, T, N: tl.constexpr,
                      K: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, E4M3: tl.constexpr,
                      EPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program per BLOCK_N rows of W; BLOCK_N divides 128, and BLOCK_K is 128 where W has scales."""
    groups: tl.constexpr = (K + 127) // 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + t[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + n[:, None].to(tl.int64) * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :],
                    other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            gain = tl.load(gain_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = to_dtype(wide * gain[None, :], x_ptr.dtype.element_ty)
        w = w.to(tl.float32) if INTERPRETED else w.to(x.dtype)
        part = tl.dot(operand(x), tl.trans(w), input_precision="ieee")
        if E4M3:
            part *= tl.load(scale_ptr + tl.program_id(0) * BLOCK_N // 128 * groups + k0 // 128)
        acc += part
    if NORM:
        acc *= (1.0 / tl.sqrt_rn(squares / K + EPS))[:, None]
    acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = t[:, None] * N + n[None, :]
    inside = (t < T)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, to_dtype(acc, y_ptr.dtype.element_ty), mask=inside)


def few_config(tokens: int, n: int, e4m3: bool) -> dict[str, int]:
    """Tile and launch options: enough programs for every multiprocessor, enough stages to keep the memory busy."""
    wide = n >= 4096
    return {"BLOCK_T": 16 if tokens <= 16 else 32, "BLOCK_N": 32 if wide else 16, "BLOCK_K": 128,
            "num_warps": 4 if wide else 2, "num_stages": 8 if e4m3 else 6}


@register("few_linear", "triton", rank=100, obstacle=triton_obstacle)
def few_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, scale_inv: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.fused.few_linear`, for at most 32 tokens; everything contiguous. ValueError otherwise."""
    check_few(x, weight, bias, scale_inv, norm_weight, residual)
    t, k = x.shape
    n = weight.shape[0]
    y = torch.empty(t, n, dtype=x.dtype, device=x.device)
    config = few_config(t, n, scale_inv is not None)
    few_linear_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
        x, weight, bias if scale_inv is None else scale_inv, bias, bias if norm_weight is None else norm_weight,
        x if residual is None else residual, y, t, N=n, K=k, NORM=norm_weight is not None,
        RESIDUAL=residual is not None, E4M3=scale_inv is not None, EPS=eps, **config)
    return y


register("few_linear", "reference", rank=1000)(few_linear)


def check_few(x, weight, bias, scale_inv, norm_weight, residual) -> None:
    """ValueError, one line, unless these are the operands of a `few_linear`."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= MOST_TOKENS:
        raise ValueError(f"few_linear: x has shape {list(x.shape)}; [T, K] with 1 to {MOST_TOKENS} rows is needed")
    (t, k), n = x.shape, weight.shape[0]
    if weight.shape != (n, k) or bias.shape != (n,):
        raise ValueError(f"few_linear: weight {list(weight.shape)} and bias {list(bias.shape)} for rows of {k}; "
                         f"[N, {k}] and [N] are needed")
    if (weight.dtype == torch.float8_e4m3fn) != (scale_inv is not None):
        raise ValueError(f"few_linear: the weight is {weight.dtype} and its scales "
                         f"{'missing' if scale_inv is None else 'given'}; e4m3 has scales and others none")
    if scale_inv is not None and scale_inv.shape != (-(-n // 128), -(-k // 128)):
        raise ValueError(f"few_linear: scales {list(scale_inv.shape)}; {[-(-n // 128), -(-k // 128)]} are needed")
    if norm_weight is not None and norm_weight.shape != (k,):
        raise ValueError(f"few_linear: norm weight has shape {list(norm_weight.shape)}; [{k}] is needed")
    if residual is not None and (residual.shape != (t, n) or residual.dtype != x.dtype):
        raise ValueError(f"few_linear: residual is {residual.dtype} {list(residual.shape)}; {x.dtype} {[t, n]} is "
                         "needed")
    if not all(a is None or a.is_contiguous() for a in (x, weight, bias, scale_inv, norm_weight, residual)):
        raise ValueError("few_linear: x, weight, bias, scales and residual must be contiguous; one of them is not")
