"""Which kernels run the fast forward: chosen once, with the reason, like the plain model's (model/operations.py).

    norm_residual, rope_cache, fp8_linear, few_linear   gptoss_kernels.reference.fused has their meaning
    moe_layer                                           router to residual, gptoss_kernels.moe
    attention.prefill, .paged_prefill, .paged_decode    planned once per step and kind of layer; these names only say
                                                        which backend the plans are made with
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

import gptoss_kernels.moe.layer
import gptoss_kernels.projection
import gptoss_kernels.rope
from gptoss_kernels.registry import BackendUnavailable, Choice, choose
from gptoss_lab.config import ModelConfig

_ROOMS = (gptoss_kernels.moe.layer, gptoss_kernels.projection, gptoss_kernels.rope)
"""Importing a room registers its backends."""
ATTENTION = ("attention.prefill", "attention.paged_prefill", "attention.paged_decode")


@dataclass(frozen=True)
class FastOperations:
    """The choices of a fast model; attention: backend of each attention form, "auto" unless asked for."""

    norm_residual: Choice
    rope_cache: Choice
    fp8_linear: Choice
    few_linear: Choice
    moe_layer: Choice
    attention: Mapping[str, str]

    def table(self) -> list[tuple[str, str, str]]:
        """(operation, backend, reason) of every operation, to print."""
        chosen = [getattr(self, f.name) for f in fields(self) if f.name != "attention"]
        return [(c.operation, c.backend, c.reason) for c in chosen] + [
            (form, backend, "chosen by each plan" if backend == "auto" else "asked for")
            for form, backend in self.attention.items()
        ]


def choose_fast_operations(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, expert_form: str,
    backends: Mapping[str, str] | None = None,
) -> FastOperations:
    """Choose all operations. backends: operation -> backend, for what should not be "auto".

    BackendUnavailable if a choice cannot be honoured or names an operation that the fast forward does not have.
    """
    wanted = dict(backends or {})
    names = [f.name for f in fields(FastOperations) if f.name != "attention"]
    unknown = sorted(set(wanted) - {*names, *ATTENTION})
    if unknown:
        raise BackendUnavailable(f"the fast forward has no operation {unknown[0]!r}; it has "
                                 f"{', '.join((*names, *ATTENTION))}")
    needs = {"device": device, "dtype": dtype, "expert_form": expert_form, "hidden_size": config.hidden_size}
    projected = {"q_size": config.q_size, "qkv_size": config.qkv_size}
    more = {"moe_layer": {"intermediate_size": config.intermediate_size}, "fp8_linear": projected,
            "few_linear": projected}
    choices = {name: choose(name, wanted.get(name, "auto"), **needs, **more.get(name, {})) for name in names}
    return FastOperations(**choices, attention={form: wanted.get(form, "auto") for form in ATTENTION})
