"""Profile a step on this machine: the fast forward, on the GPU with its kernels, on the CPU with their plain forms.

On a GPU: four layers of gpt-oss-20b with random weights in FP8. On the CPU: the chosen checkpoint, whose plain forms
have other costs than the kernels; what the two share is the order of the layer and the way of looking.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench import profile
from gptoss_lab.bench.fast_model import Subject, centre_routers
from gptoss_lab.bench.trace import Kernel
from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.synthetic import Synthetic
from gptoss_lab.config import preset
from gptoss_lab.model.fast import FastWeights, lay_out

os.environ.setdefault("KINETO_LOG_LEVEL", "6")      # else the profiler writes to stderr that it starts and stops
GPU_LAYERS, GPU_TOKENS, CPU_TOKENS = 4, 8192, 256


@dataclass(frozen=True)
class Profile:
    """kernels: what ran, by start. rows: of suite "profile". about: one line that says what was profiled, and where."""

    kernels: list[Kernel]
    rows: list[dict[str, Any]]
    about: str


def subject(checkpoint: Path, device: torch.device) -> Subject:
    """What is profiled on this machine."""
    if device.type == "cuda":
        return Subject(preset("gpt-oss-20b").with_layers(GPU_LAYERS), "fp8", "fp8", device)
    return Subject(open_checkpoint(checkpoint).config, "dense", "dense", device, checkpoint)


def weights(of: Subject) -> FastWeights:
    """The weights of a subject, to profile more than one step with."""
    if of.checkpoint is None:
        made = lay_out(Synthetic(of.config), of.device, of.dtype, experts=of.experts, projections=of.projections)
        centre_routers(made)
        return made
    return lay_out(open_checkpoint(of.checkpoint), of.device, of.dtype, experts=of.experts, projections=of.projections)


def run(of: Subject, laid_out: FastWeights, phase: str) -> Profile:
    """Profile one step: "prefill" or "decode" (one sequence at that many tokens)."""
    tokens = GPU_TOKENS if of.device.type == "cuda" else CPU_TOKENS
    rows, kernels = profile.run(of, phase, tokens, weights=laid_out)
    where = torch.cuda.get_device_name() if of.device.type == "cuda" else "CPU, operators in place of kernels"
    what = f"{tokens} tokens" if phase == "prefill" else f"one token at {tokens}"
    return Profile(kernels, rows, f"{of.config.name}, {of.config.num_layers} layers, {phase} of {what}; {where}")
