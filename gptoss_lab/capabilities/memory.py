"""Which models fit where: weights in three forms against the memory of a GPU, the machine's RAM and its disk.

Bytes follow from the configuration alone (published `total_size` of both checkpoints, to the byte). What a run needs
beside the weights is an estimate, `RESERVE`, plus the cache of one sequence of `SHORTEST` tokens on a GPU.
What is lost: the exact peak of a run, which only a run tells.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptoss_lab.capabilities.machine import GB, Gpu, Machine
from gptoss_lab.config import ModelConfig, preset

MODELS = ("gpt-oss-20b", "gpt-oss-120b")
FORMS = {"mxfp4": "MXFP4 (as released)", "fp8": "FP8 128x128", "bf16": "bf16"}
RESERVE = {"GPU": 3 * GB, "RAM": 2 * GB, "disk": 1 * GB}
"""Bytes set aside beside the weights for context, activations and workspaces, or the system: an estimate."""
SHORTEST = 8192
"""Tokens of KV cache that have to fit beside the weights before a model counts as fitting a GPU."""


@dataclass(frozen=True)
class Fit:
    """A model's weights in one form against one memory. need: bytes with what is set aside; have: bytes there are."""

    model: str
    form: str
    place: str
    weights: int
    need: int
    have: int
    fits: bool
    note: str


def weight_bytes(config: ModelConfig, form: str) -> tuple[int, int]:
    """Bytes of (expert matrices with their scales, everything else in bf16) of a checkpoint.

    form: "mxfp4" 4 bits and a scale byte per 32 weights; "fp8" one byte and an fp32 scale per 128x128 block, the last
    block of an axis partial; "bf16".
    """
    c, h, i = config, config.hidden_size, config.intermediate_size
    shapes = ((2 * i, h), (h, i))
    matrices = {
        "mxfp4": lambda out, inner: out * inner // 32 * 17,
        "fp8": lambda out, inner: out * inner + 4 * -(-out // 128) * -(-inner // 128),
        "bf16": lambda out, inner: 2 * out * inner,
    }[form]
    experts = c.num_layers * c.num_experts * sum(matrices(*shape) for shape in shapes)
    attention = c.qkv_size * (h + 1) + c.num_heads + h * (c.q_size + 1)
    router = c.num_experts * (h + 1)
    biases = c.num_experts * (2 * i + h)
    rest = c.num_layers * (attention + router + biases + 2 * h) + h + 2 * c.vocab_size * h
    return experts, 2 * rest


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of one sequence's keys and values in bf16; sliding layers hold no more than their window."""
    row = 2 * 2 * config.kv_size
    layers = [min(tokens, config.sliding_window) if config.is_sliding(n) else tokens for n in range(config.num_layers)]
    return row * sum(layers)


def fits(machine: Machine) -> list[Fit]:
    """Every model and form against every kind of GPU here, against memory, and its FP8 conversion against the disk."""
    return [fit for model in MODELS for fit in _fits_of(machine, preset(model))]


def _fits_of(machine: Machine, config: ModelConfig) -> Iterator[Fit]:
    for form in FORMS:
        for gpu in dict.fromkeys(machine.gpus):
            yield _on_gpu(config, form, gpu, machine.gpus.count(gpu))
        yield _in(config, form, "RAM", machine.ram, "on the CPU with the reference kernels: right, but slow")
    yield _in(config, "fp8", "disk", machine.disk_free, "room for the converted checkpoint")


def _in(config: ModelConfig, form: str, place: str, have: int, note: str) -> Fit:
    weights = sum(weight_bytes(config, form))
    need = weights + RESERVE[place]
    fit = need <= have
    short = f"{(need - have) / GB:.1f} GB are missing"
    return Fit(config.name, form, f"{place} ({have / GB:.1f} GB)", weights, need, have, fit, note if fit else short)


def _on_gpu(config: ModelConfig, form: str, gpu: Gpu, count: int) -> Fit:
    experts, rest = weight_bytes(config, form)
    shortest = cache_bytes(config, SHORTEST)
    need = experts + rest + RESERVE["GPU"] + shortest
    left = gpu.memory - experts - rest - RESERVE["GPU"]
    per_token = cache_bytes(config, 1 + config.sliding_window) - cache_bytes(config, config.sliding_window)
    if left >= shortest:
        note = f"room for {left // per_token:,} tokens of KV cache (bf16)"
    else:
        note = f"{(shortest - left) / GB:.1f} GB are missing" + _several(experts, rest, shortest, gpu, count)
    return Fit(config.name, form, gpu.label, experts + rest, need, gpu.memory, left >= shortest, note)


def _several(experts: int, rest: int, cache: int, gpu: Gpu, count: int) -> str:
    """How many such GPUs would hold it, the experts split over them and everything else on each."""
    for ranks in (2, 4, 8):
        if experts // ranks + rest + RESERVE["GPU"] + cache <= gpu.memory:
            return f"; it fits with its experts spread over {ranks} such GPUs (this machine has {count})"
    return "; it does not fit with its experts spread over 8 such GPUs either"
