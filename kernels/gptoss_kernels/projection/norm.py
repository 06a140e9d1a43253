"""RMSNorm before the QKV projection, and in the same pass the residual stream with the output bias added.

The output projection of a layer ends in x + bias + attention . W. A library product can accumulate onto a matrix, but
only in place and without a bias beside it; so x + bias is written here, where x is read anyway, and the product is
accumulated onto it. That saves a pass over the residual stream per layer, and a launch. x + bias is rounded once to
the stream's dtype, as projection + bias was before.

Without a bias it is RMSNorm alone, in one launch (the norm before the head).
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.projection.backends import triton_obstacle
from gptoss_kernels.quant.rounding import to_dtype
from gptoss_kernels.reference.fused import norm_residual
from gptoss_kernels.registry import register


@triton.jit
def norm_residual_kernel(x_ptr, gain_ptr, bias_ptr, normed_ptr, shifted_ptr, H: tl.constexpr, H_PAD: tl.constexpr,
                         BIAS: tl.constexpr, EPS: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H_PAD)
    x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / H + EPS)
    gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * H + h, to_dtype(x * scale * gain, normed_ptr.dtype.element_ty), mask=h < H)
    if BIAS:
        bias = tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(shifted_ptr + row * H + h, to_dtype(x + bias, shifted_ptr.dtype.element_ty), mask=h < H)


def norm_residual_config(h: int) -> dict[str, int]:
    """Lanes of a program of `norm_residual_kernel`, which holds a row of h columns, and its warps."""
    return {"H_PAD": triton.next_power_of_2(h), "num_warps": 8 if h > 1024 else 4}


@register("norm_residual", "triton", rank=100, obstacle=triton_obstacle)
def norm_residual_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `reference.fused.norm_residual`; x [T, H] contiguous bf16 or fp32, weight and bias [H] bf16 or fp32."""
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"norm_residual: x has shape {list(x.shape)}, contiguous {x.is_contiguous()}; [T, H] "
                         "contiguous is needed")
    t, h = x.shape
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (h,):
            raise ValueError(f"norm_residual: {name} has shape {list(vector.shape)}; [{h}] is needed")
    normed = torch.empty_like(x)
    shifted = None if bias is None else torch.empty_like(x)
    norm_residual_kernel[(t,)](
        x, weight, x if bias is None else bias, normed, normed if shifted is None else shifted, H=h,
        BIAS=bias is not None, EPS=eps, **norm_residual_config(h))
    return normed, shifted


register("norm_residual", "reference", rank=1000)(norm_residual)
