"""Mixture of experts: route, the clamped SwiGLU, one expert, and the weighted sum over a token's experts.

The softmax is taken over the selected logits only, and each expert's down bias is inside the weighted sum. Ties go to
the lowest expert id: router logits are often bf16, so equal ones are ordinary.
"""
from __future__ import annotations

from collections.abc import Callable

import torch


def route(
    logits: torch.Tensor, experts_per_token: int, weight_dtype: torch.dtype = torch.float32, softmax: str = "after"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and their weights.

    logits: [.., E]. Returns ids [.., k] int64, by descending logit (equal logits: ascending id), and weights [.., k] in
    `weight_dtype`. softmax: "after" is over the k selected logits (gpt-oss); "before" is over all E, not renormalised.
    """
    if not 0 < experts_per_token <= logits.shape[-1]:
        raise ValueError(f"route: {experts_per_token} experts per token of {logits.shape[-1]}; between 1 and that")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ordered, ids = torch.sort(wide, dim=-1, descending=True, stable=True)
    ordered, ids = ordered[..., :experts_per_token], ids[..., :experts_per_token]
    if softmax == "after":
        weights = torch.softmax(ordered, dim=-1)
    elif softmax == "before":
        weights = torch.softmax(wide, dim=-1).gather(-1, ids)
    else:
        raise ValueError(f"route: softmax is {softmax!r}; 'after' or 'before' the selection")
    return ids, weights.to(weight_dtype)


def swiglu(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """Clamped SwiGLU on interleaved columns: even = gate (clamped from above only), odd = up (clamped on both sides).

    gate_up: [..., 2 I]. Returns [..., I] = g sigmoid(alpha g) (u + 1), computed in fp32 at least, in gate_up's dtype.
    """
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate = wide[..., 0::2].clamp(max=limit)
    up = wide[..., 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def expert_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """One expert on its rows: down(swiglu(gate_up(x))). x: [R, H]; gate_up: [2 I, H]; down: [H, I] (out, in)."""
    h = swiglu(torch.nn.functional.linear(x, gate_up, gate_up_bias), alpha, limit)
    return torch.nn.functional.linear(h, down, down_bias)


def combine_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
    experts: range | None = None,
) -> torch.Tensor:
    """sum over each token's experts of weight * expert(rows), in ascending expert id, accumulated in fp32 at least.

    x: [T, H]. ids, weights: [T, k]. expert(e, rows [R, H]) -> [R, H], called once for each expert that has rows.
    experts: the ids that live here (default: all); a choice outside them adds nothing. Returns [T, H] in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    ordered, order = torch.sort(ids.flatten(), stable=True)              # [T k]: the rows of one expert side by side
    token, weight = order // ids.shape[1], weights.flatten()[order].to(wide)[:, None]
    chosen, counts = torch.unique_consecutive(ordered, return_counts=True)
    start = 0
    for e, count in torch.stack([chosen, counts], dim=1).tolist():
        rows = slice(start, start + count)
        start += count
        if experts is None or e in experts:
            total.index_add_(0, token[rows], expert(e, x[token[rows]]).to(wide) * weight[rows])
    return total.to(x.dtype)
