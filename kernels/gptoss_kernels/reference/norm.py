"""RMSNorm: the scale is multiplied in fp32, before the one rounding to the output's dtype."""
from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """y = cast(x / sqrt(mean(x^2) + eps) * weight), computed in fp32 (fp64 for fp64 input) and rounded once.

    x: [..., H] any float dtype. weight: [H]. Returns [..., H] in x's dtype. (Llama rounds before the multiplication
    with the weight; gpt-oss does not, and in bf16 the two differ.)
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight has shape {list(weight.shape)}; x needs [{x.shape[-1]}]")
    wide = torch.promote_types(x.dtype, torch.float32)
    t = x.to(wide)
    t = t * torch.rsqrt(t.square().mean(dim=-1, keepdim=True) + eps)
    return (t * weight.to(wide)).to(x.dtype)
