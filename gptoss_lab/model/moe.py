"""The expert layer: a router chooses k of E experts for every token, and their outputs are summed with its weights.

What the router computes in is a switch. OpenAI's code rounds the router's logits and weights to bf16 on the way, which
decides near-ties between experts; `router_dtype` is either that or fp32.
"""
from __future__ import annotations

import torch
from torch import nn

from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_lab.model.collectives import Collectives
from gptoss_lab.model.operations import Operations
from gptoss_lab.model.step import Step


class Router(nn.Module):
    """logits = weight x + bias; the k largest; softmax over those k. weight: [E, H], bias: [E], both in its dtype."""

    def __init__(
        self, hidden_size: int, num_experts: int, experts_per_token: int, operations: Operations, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype), requires_grad=False)
        self.experts_per_token = experts_per_token
        self._route = operations.route.function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [T, H] -> ids [T, k] int64, weights [T, k], logits [T, E]; the latter two in the router's dtype."""
        dtype = self.weight.dtype
        logits = nn.functional.linear(x.to(dtype), self.weight, self.bias)
        ids, weights = self._route(logits, self.experts_per_token, dtype)
        return ids, weights, logits

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden} -> {experts}, top {self.experts_per_token}, {self.weight.dtype}"


class ExpertProjection(nn.Module):
    """One projection of every expert, [E, out, in], in its stored form, with its bias [E, out].

    form, values, scales: see gptoss_kernels.reference.experts.ExpertMatrices.
    """

    def __init__(self, matrices: ExpertMatrices, bias: torch.Tensor) -> None:
        super().__init__()
        self.form = matrices.form
        self.values = nn.Parameter(matrices.values, requires_grad=False)
        scales = matrices.scales
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    @property
    def matrices(self) -> ExpertMatrices:
        """What the operation "moe" takes."""
        return ExpertMatrices(self.form, self.values, self.scales)

    def extra_repr(self) -> str:
        return f"{self.form}, values {list(self.values.shape)} {self.values.dtype}, bias {list(self.bias.shape)}"


class MoE(nn.Module):
    """Router and experts of one layer. gate_up: E matrices [2 I, H], rows alternating gate and up; down: E of [H, I].

    first_expert: global id of the first expert held here; choices outside them are other ranks' work.
    """

    def __init__(
        self,
        layer: int,
        router: Router,
        gate_up: ExpertProjection,
        down: ExpertProjection,
        alpha: float,
        limit: float,
        operations: Operations,
        collectives: Collectives,
        first_expert: int = 0,
    ) -> None:
        super().__init__()
        self.layer, self.alpha, self.limit, self.first_expert = layer, alpha, limit, first_expert
        self.router, self.gate_up, self.down = router, gate_up, down
        self._moe = operations.moe.function
        self._collectives = collectives

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [T, H] normed -> [T, H], to be added to the residual stream."""
        ids, weights, logits = self.router(x)
        if step.observe is not None:
            step.observe("router_logits", self.layer, logits)
            step.observe("router_ids", self.layer, ids)
            step.observe("router_weights", self.layer, weights)
        x, ids, weights = self._collectives.dispatch(x, ids, weights)        # T tokens -> T' tokens
        part = self._moe(
            x, ids, weights, self.gate_up.matrices, self.gate_up.bias, self.down.matrices, self.down.bias,
            alpha=self.alpha, limit=self.limit, first_expert=self.first_expert,
        )
        return self._collectives.combine(part)                               # [T', H] -> [T, H]

    def extra_repr(self) -> str:
        return f"swiglu alpha={self.alpha}, limit={self.limit}"
