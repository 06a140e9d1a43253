"""What the fused kernels around attention compute, step by step in plain torch.

`norm_residual`: RMSNorm, and beside it the residual stream with the output projection's bias already added, which that
projection's product is then accumulated onto. `rope_cache`: split the fused QKV rows, turn queries and keys by their
position, and put keys and values where the cache keeps them. `fp8_linear`: a product with e4m3 blocks and its bias.
`few_linear`: a product with all that stands around it, for the few tokens of a decode step.
"""
from __future__ import annotations

import torch

from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import E4M3_MAX, dequantise_blocks
from gptoss_kernels.reference.rope import apply_rope


def norm_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x: [T, H]. weight: [H]. bias: [H] or None. Returns rms_norm(x) and x + bias (None without one), in x's dtype."""
    shifted = None if bias is None else x + bias.to(x.dtype)
    return rms_norm(x, weight, eps), shifted


def rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: int,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    rows: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Split, turn and store the QKV rows of new tokens.

    qkv: [T, (heads + 2 Hkv) D], rows Q, K, V. positions: [T] int32. cos, sin: [P, D / 2] fp32 tables for positions
    0..P-1, concentration included. k_pages, v_pages: [pages, page_size, Hkv, D], written: token t goes to row slots[t]
    of all pages' rows one after the other; slots [T] int32, -1: not kept. scales: of e4m3 pages, two [Hkv] fp32; a page
    holds key / scale, clamped to +-448. keys, values: [R, Hkv, D] in qkv's dtype, written as well: token t to row t, or
    to rows[t] (int32); beside e4m3 pages they get what those hold, rounded and times the scale. Returns the turned
    queries [T, heads, D] in qkv's dtype.
    """
    kv_heads, d = k_pages.shape[2:]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((heads, kv_heads, kv_heads), dim=1)       # [T, heads or Hkv, D]
    at = positions.long()
    q, k = (apply_rope(part, cos[at], sin[at]) for part in (q, k))
    kept = slots >= 0
    for number, (pages, part, whole) in enumerate(((k_pages, k, keys), (v_pages, v, values))):
        stored = part
        if scales is not None:
            scale = scales[number][:, None]
            stored = (part.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(pages.dtype)
            part = (stored.float() * scale).to(qkv.dtype)
        pages.view(-1, kv_heads, d)[slots[kept].long()] = stored[kept]
        if whole is not None:
            whole[slice(part.shape[0]) if rows is None else rows.long()] = part
    return q


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, bias: torch.Tensor, norm_weight: torch.Tensor | None
    = None, eps: float = 1e-5,
) -> torch.Tensor:
    """bias + norm(x) . weight^T in x's dtype, activations not quantised.

    x: [T, K]. weight: [N, K] float8_e4m3fn. scale_inv: [ceil(N / 128), ceil(K / 128)] fp32. bias: [N]. norm_weight:
    [K], or None if x is what is multiplied. Returns [T, N].
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    return torch.nn.functional.linear(x, dequantise_blocks(weight, scale_inv, dtype=x.dtype), bias.to(x.dtype))


def few_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale_inv: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + bias + norm(x) . weight^T, the sum of the three rounded once to x's dtype.

    x: [T, K]. weight: [N, K] in x's dtype, or float8_e4m3fn with scale_inv [ceil(N / 128), ceil(K / 128)] fp32. bias:
    [N]. norm_weight: [K], or None if x is what is multiplied. residual: [T, N] or None. Returns [T, N].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    dense = weight.to(wide) if scale_inv is None else dequantise_blocks(weight, scale_inv, dtype=wide)
    y = torch.nn.functional.linear(x.to(wide), dense, bias.to(wide))
    return (y if residual is None else y + residual.to(wide)).to(x.dtype)
