"""Operations of the model with one thing changed, registered beside the real backends but out of everybody's reach.

A variant that rounds or reorders is the reference with that one change. Each is a backend of its operation, so a model
is built with it as with any other; its obstacle refuses unless the study is building (`studying`), and its rank stands
behind the reference, so "auto" never comes to it.

    route   "study: logits in bf16"             router logits rounded to bf16, everything after in fp32
            "study: weights in bf16"            softmax in fp32, its weights rounded to bf16
            "study: softmax before top-k"       over all experts, not renormalised over the chosen
    moe     "study: activations in e4m3"        1x128 groups before each product; what follows a product is fp32, as in
                                                the FP8 kernels, and only the sum is rounded to the model's dtype
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from gptoss_kernels.reference import RANK
from gptoss_kernels.reference.experts import ExpertMatrices, dense_matrix
from gptoss_kernels.reference.moe import combine_experts, route, swiglu
from gptoss_kernels.reference.quant import dequantise_groups, quantise_groups
from gptoss_kernels.registry import register

LOGITS, WEIGHTS, BEFORE = "study: logits in bf16", "study: weights in bf16", "study: softmax before top-k"
ACTIVATIONS = "study: activations in e4m3"
_asked: list[bool] = []


@contextmanager
def studying() -> Iterator[None]:
    """Inside, the backends of this module can be asked for by name."""
    _asked.append(True)
    try:
        yield
    finally:
        _asked.pop()


def _obstacle(**needs: Any) -> str | None:
    return None if _asked else "it changes the arithmetic on purpose; only gptoss_lab.train.study asks for it"


def _study(operation: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return register(operation, name, rank=10 * RANK, obstacle=_obstacle)


@_study("route", LOGITS)
def route_rounded_logits(
    logits: torch.Tensor, experts_per_token: int, weight_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.moe.route` on logits [T, E] rounded to bf16."""
    return route(logits.bfloat16(), experts_per_token, weight_dtype)


@_study("route", WEIGHTS)
def route_rounded_weights(
    logits: torch.Tensor, experts_per_token: int, weight_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.moe.route`, the weights [T, k] rounded to bf16."""
    ids, weights = route(logits, experts_per_token, torch.bfloat16)
    return ids, weights.to(weight_dtype)


@_study("route", BEFORE)
def route_softmax_before(
    logits: torch.Tensor, experts_per_token: int, weight_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.moe.route` with the softmax over all experts: the weights [T, k] add up to less than 1."""
    return route(logits, experts_per_token, weight_dtype, softmax="before")


@_study("moe", ACTIVATIONS)
def moe_with_e4m3_activations(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: ExpertMatrices, gate_up_bias: torch.Tensor,
    down: ExpertMatrices, down_bias: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0, first_expert: int = 0,
) -> torch.Tensor:
    """Arguments and result as `reference.experts.moe`."""

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        e -= first_expert
        up, out = (dense_matrix(matrices, e, torch.float32) for matrices in (gate_up, down))
        h = swiglu(functional.linear(_through_e4m3(rows), up, gate_up_bias[e].float()), alpha, limit)
        return functional.linear(_through_e4m3(h), out, down_bias[e].float())

    return combine_experts(x, ids, weights, expert, range(first_expert, first_expert + gate_up.values.shape[0]))


def _through_e4m3(x: torch.Tensor) -> torch.Tensor:
    """[R, K] -> the fp32 values that its e4m3 groups of 128 columns stand for."""
    return dequantise_groups(*quantise_groups(x))
