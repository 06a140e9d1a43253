"""Muon for the matrices between hidden states, AdamW for all else.

Muon moves a matrix by the orthogonal factor of its momentum, so every direction of it moves equally far; five steps of
a Newton-Schulz iteration in bf16 give that factor well enough (K. Jordan et al., 2024). Here the matrices of all layers
and experts that share a shape go through it as one batch. Embeddings, norms, biases, sinks and the router are AdamW's.

Every step of Muon is as long as the last, so matrices grow as long as the rate lasts. Weight decay holds that down, and
for attention a cap besides: the architecture has no norm on queries and keys, so the scores grow with the square of
their weights (without the two, a small run had scores beyond 200 after 2,500 updates: a softmax that only points, sinks
that no head can feel, and sums that bf16 gets wrong). A head's rows are scaled back where their root mean square
exceeds CAP times that of a fresh matrix.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MATRICES = ("qkv", "out", "gate_up", "down")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
CAP = 1.5
"""Of the rows of a head in `qkv`: their root mean square, in units of 1 / sqrt(columns), is at most this."""


class Optimiser:
    """parameters: (name, parameter). muon, adamw: learning rates at factor 1, muon 0 to give AdamW everything.
    weight_decay: of Muon's matrices. head_dim: rows of a head in a matrix `qkv`; None caps no heads.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, muon: float, adamw: float, weight_decay: float = 0.1,
        head_dim: int | None = None,
    ) -> None:
        named = dict(parameters)
        self.matrices = {n: p for n, p in named.items() if muon and n.rpartition(".")[2] in MATRICES}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        others = [p for n, p in named.items() if n not in self.matrices]
        self.muon, self.weight_decay, self.adamw_rate, self.head_dim = muon, weight_decay, adamw, head_dim
        self.adamw = torch.optim.AdamW(
            others, lr=adamw, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda, eps=1e-9,
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with both learning rates times `factor`; clears the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = self.adamw_rate * factor
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for names in _by_shape(self.matrices):
            self._step_matrices(names, self.muon * factor)

    def _step_matrices(self, names: list[str], rate: float) -> None:
        """Muon on parameters of one shape [..., out, in]."""
        parameters = [self.matrices[n] for n in names]
        gradients, momenta = [p.grad for p in parameters], [self.momentum[n] for n in names]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        moves = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, MOMENTUM)))
        rows, columns = parameters[0].shape[-2:]
        scale = max(1.0, rows / columns) ** 0.5
        torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
        torch._foreach_add_(parameters, [m.to(p.dtype) for m, p in zip(moves, parameters, strict=True)],
                            alpha=-rate * scale)
        for name, p in zip(names, parameters, strict=True):
            p.grad = None
            if self.head_dim is not None and name.rpartition(".")[2] == "qkv":
                cap_heads(p, self.head_dim)

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict`."""
        return {"momentum": self.momentum, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.adamw.load_state_dict(state["adamw"])
        for name, value in state["momentum"].items():
            self.momentum[name].copy_(value)


@torch.no_grad()
def cap_heads(weight: torch.Tensor, head_dim: int) -> None:
    """Scale the heads of `weight` [heads * head_dim, in] back, in place, whose root mean square exceeds CAP."""
    heads = weight.unflatten(0, (-1, head_dim))                                       # [heads, D, in]
    size = heads.square().mean(dim=(1, 2), keepdim=True).sqrt() * weight.shape[1] ** 0.5
    heads.mul_((CAP / size).clamp(max=1.0))


def orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About U V^T of each [..., m, n] = U S V^T: singular values end between 0.7 and 1.2. bf16 on a GPU."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-2, -1) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x


def _by_shape(parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    groups: dict[torch.Size, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            groups.setdefault(parameter.shape, []).append(name)
    return list(groups.values())
