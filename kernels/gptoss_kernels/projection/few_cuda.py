"""The dense product for a few tokens as a kernel of our own for Hopper (`moe/cuda/few_linear.cu`).

Why beside the Triton form: there a program reads its weights in turns of 128 columns, each of which waits for the one
before, and a turn takes most of a microsecond, so a matrix that memory delivers in 4 us took 15 to 30. Here everything
is asked for at once, and before the kernel in front has ended.
"""
from __future__ import annotations

import functools

import torch

from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.projection.backends import sizes_obstacle
from gptoss_kernels.projection.few import check_few
from gptoss_kernels.registry import register

ROWS = 16


def few_defines(n: int, k: int, tokens: int, *, e4m3: bool, norm: bool, residual: bool, bias_bf16: bool,
                eps: float = 1e-5, staged: bool = False, early: bool = False) -> tuple[tuple[str, object], ...]:
    """The compile-time constants of one specialisation of `few_linear.cu`; tokens: at most so many (8, 16 or 32)."""
    return (("N", n), ("K", k), ("TOKENS", tokens), ("E4M3", int(e4m3)), ("NORM", int(norm)),
            ("RESIDUAL", int(residual)), ("BIAS_BF16", int(bias_bf16)), ("EPS", f"{float(eps)!r}f"),
            ("STAGED", int(staged)), ("EARLY", int(early)))


@functools.cache
def _kernel(n: int, k: int, tokens: int, e4m3: bool, norm: bool, residual: bool, bias_bf16: bool, eps: float,
            staged: bool, early: bool, device: int) -> driver.Kernel:
    return driver.load("few_linear.cu", "few_linear", few_defines(
        n, k, tokens, e4m3=e4m3, norm=norm, residual=residual, bias_bf16=bias_bf16, eps=eps, staged=staged,
        early=early), device)


def few_form(tokens: int, e4m3: bool) -> dict[str, bool]:
    """The forms of `few_linear.cu` that are fastest: bf16 weights leave time to bring tokens to shared memory first,
    e4m3 ones for one token alone."""
    few = tokens <= 8
    return {"staged": few and (tokens == 1 or not e4m3), "early": few}


def _obstacle(device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16, **needs: object
              ) -> str | None:
    return sizes_obstacle(needs) or gemm_cuda.obstacle(device, dtype=dtype)


@register("few_linear", "cuda", rank=10, obstacle=_obstacle)
def few_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, scale_inv: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None,
    staged: bool | None = None, early: bool | None = None,
) -> torch.Tensor:
    """As `reference.fused.few_linear`, for at most 32 tokens in bf16; N a multiple of 16, K of 64. norm_weight: fp32.
    staged: the tokens come to shared memory first, at most 8 of them. early: scales and bias are asked for with the
    weights. Default: `few_form`.

    The kernel launched last must not be what wrote the weights, scales, bias or gain: it may still run. ValueError.
    """
    check_few(x, weight, bias, scale_inv, norm_weight, residual)
    (t, k), n = x.shape, weight.shape[0]
    form = few_form(t, scale_inv is not None)
    staged, early = form["staged"] if staged is None else staged, form["early"] if early is None else early
    if n % ROWS or k % 64 or x.dtype != torch.bfloat16:
        raise ValueError(f"few_linear: the cuda backend takes bf16 rows, N in multiples of {ROWS}, K of 64; they are "
                         f"{x.dtype}, {n} and {k}")
    if norm_weight is not None and norm_weight.dtype != torch.float32:
        raise ValueError(f"few_linear: the norm weight is {norm_weight.dtype}; the cuda backend takes torch.float32")
    if bias.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"few_linear: the bias is {bias.dtype}; the cuda backend takes torch.float32 or bfloat16")
    if staged and t > 8:
        raise ValueError(f"few_linear: {t} tokens staged; at most 8 fit beside each other")
    tokens = 8 if t <= 8 else 16 if t <= 16 else 32
    kernel = _kernel(n, k, tokens, scale_inv is not None, norm_weight is not None, residual is not None,
                     bias.dtype == torch.bfloat16, eps, staged, early, x.device.index or 0)
    y = torch.empty(t, n, dtype=x.dtype, device=x.device)
    unread = bias                                                       # a pointer for what this form has not
    driver.launch(kernel, n // ROWS, 256, [
        x, weight, unread if scale_inv is None else scale_inv, bias, unread if norm_weight is None else norm_weight,
        unread if residual is None else residual, y, t], overlapping=True)
    return y
