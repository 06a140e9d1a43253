"""Which function computes each operation of the model: asked once, at load, and kept with the reason.

The model never names a library. It asks `gptoss_kernels.registry` for five operations by name; a backend registers
itself when its module is imported, and "auto" takes the best one that can run for this device, dtype and expert form.

    rms_norm(x [T, H], weight [H], eps) -> [T, H]
    rope(x [T, heads, D], cos [T, D/2], sin [T, D/2]) -> [T, heads, D]
    sink_attention(q, k, v, sinks, *, cu_seqlens_q, cu_seqlens_k, window) -> out [T, Hq, D], lse_with_sink [T, Hq]
    route(logits [T, E], k, weight_dtype) -> ids [T, k], weights [T, k]
    moe(x, ids, weights, gate_up, gate_up_bias, down, down_bias, *, alpha, limit, first_expert) -> [T, H]

Exact shapes: gptoss_kernels/reference. Offsets (cu_seqlens) are tuples of ints on the host, the same object for every
layer of a step, so a backend that needs them on the device can keep its copy.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

import gptoss_kernels.reference  # registers the reference backends
from gptoss_kernels.registry import BackendUnavailable, Choice, choose

REFERENCE = gptoss_kernels.reference.RANK


@dataclass(frozen=True)
class Operations:
    """The five choices of a loaded model; each has .backend, .reason and .function."""

    rms_norm: Choice
    rope: Choice
    sink_attention: Choice
    route: Choice
    moe: Choice

    def table(self) -> list[tuple[str, str, str]]:
        """(operation, backend, reason) of every operation, to print."""
        return [(c.operation, c.backend, c.reason) for c in (getattr(self, f.name) for f in fields(self))]


def choose_operations(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    expert_form: str = "dense",
    backends: Mapping[str, str] | None = None,
) -> Operations:
    """Choose all operations for a device, a dtype and the form of the expert weights ("dense", "mxfp4" or "fp8").

    backends: operation -> backend, for what should not be "auto". BackendUnavailable if a choice cannot be honoured or
    names an operation that the model does not have.
    """
    wanted = dict(backends or {})
    names = [f.name for f in fields(Operations)]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise BackendUnavailable(f"the model has no operation {unknown[0]!r}; it has {', '.join(names)}")
    needs = {"device": torch.device(device), "dtype": dtype, "expert_form": expert_form}
    return Operations(**{name: choose(name, wanted.get(name, "auto"), **needs) for name in names})
