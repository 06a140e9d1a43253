"""What a conversion has to do: every tensor of the target, and what it is made from, as a list that can be checked
before it runs.

A task fills one or two target tensors (FP8 and MXFP4 come as a pair) from one weight of the source, in pieces that
bound memory: one expert, or some rows. The list is made from the target's manifest, so a tensor cannot be forgotten,
and the ledger of what was read is compared with the source's, so none can be left over or used twice.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.forms import Parts, to_bf16, to_fp8, to_mxfp4
from gptoss_lab.checkpoint.manifest import TensorSpec, layer_of, manifest
from gptoss_lab.checkpoint.names import RowRange, original_source
from gptoss_lab.checkpoint.reader import Checkpoint
from gptoss_lab.checkpoint.report import BlockReport, Report
from gptoss_lab.checkpoint.stored import Stored

_COPY_BYTES = 16 << 20
Read = tuple[str, int, int]                 # tensor on disk, first row, one past the last


@dataclass(frozen=True)
class Target:
    """What to convert to. layout: "fp8", "bf16" or "hf" (MXFP4). The other fields as in `convert`."""

    layout: str
    scales: str = "pow2"
    attention_fp8: bool = False
    experts_order: str = "out_in"

    def specs(self, source: Checkpoint) -> tuple[TensorSpec, ...]:
        """Every tensor to be written."""
        return manifest(
            source.config, self.layout, attention_fp8=self.attention_fp8, experts_order=self.experts_order
        )


@dataclass(frozen=True)
class Task:
    """Fill `specs` from one weight of the source.

    name: of the weight, which is what its tensors' names begin with; for a copy the tensor's own name. rule: "copy",
    or "<form> to <form>". sources: the tensors it reads, by Hugging Face name. pieces: what to read at a time,
    [start, stop) of the first axis: rows of a copy, one expert, or a whole linear weight.
    """

    name: str
    rule: str
    sources: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    pieces: tuple[tuple[int, int | None], ...]

    @property
    def is_experts(self) -> bool:
        """Whether the weight is the experts' and the first axis counts them."""
        return self.rule != "copy" and ".mlp.experts." in self.name

    def run(
        self, source: Checkpoint, target: Target, piece: tuple[int, int | None], device: torch.device | str
    ) -> tuple[Parts, Report | None]:
        """One piece: target name -> data on `device`, and the report of a weight that changed form."""
        if self.rule == "copy":
            data = source.rows(self.name, *piece, device=device)
            if self.name.endswith("_scales"):
                mxfp4.check_scales(data, f"{self.name}, experts from {piece[0]}")
            return {self.name: data}, None
        if not self.is_experts:
            parts, report = _convert(source.linear(self.name, device=device), self.specs[0], target, self.name)
        else:
            layer, projection = layer_of(self.name) or 0, self.name.rsplit(".", 1)[1]
            stored = source.experts(layer, projection, slice(*piece), device=device)
            parts, report = _convert(stored, self.specs[0], target, f"{self.name}, expert {piece[0]}")
            if isinstance(report, BlockReport):
                report.wide = [replace(block, expert=piece[0]) for block in report.wide]
        return {self.name + suffix: data for suffix, data in parts.items()}, report

    def reads(self, source: Checkpoint, piece: tuple[int, int | None]) -> list[Read]:
        """The rows on disk that `run` reads for a piece."""
        return [place(source, name, *piece) for name in self.sources]


def plan_tasks(source: Checkpoint, target: Target) -> list[Task]:
    """All tasks, in the target's file order. CheckpointError if one of the target's tensors has no source."""
    groups: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in target.specs(source):
        groups[_weight_name(spec, source, target)].append(spec)
    return [_task(source, target, name, tuple(specs)) for name, specs in groups.items()]


def group_by_layer(tasks: Iterable[Task]) -> list[list[Task]]:
    """One file per layer, after one for everything outside the layers."""
    files: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        layer = layer_of(task.name)
        files[-1 if layer is None else layer].append(task)
    return [files[key] for key in sorted(files)]


def check_reads(source: Checkpoint, reads: Iterable[Read]) -> None:
    """CheckpointError unless every row of every tensor of the source was read exactly once."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, start, stop in reads:
        ranges[name].append((start, stop))
    for spec in source.specs:
        end = 0
        for start, stop in sorted(ranges.pop(spec.name, [])):
            if start != end:
                kind = "were read twice" if start < end else "were not read"
                raise CheckpointError(f"rows {min(start, end)}..{max(start, end)} of {spec.name} {kind}")
            end = stop
        if end != spec.shape[0]:
            raise CheckpointError(f"rows {end}..{spec.shape[0]} of {spec.name} were not read")
    if ranges:
        raise CheckpointError(f"{next(iter(ranges))} was read, which the source does not have")


def place(source: Checkpoint, name: str, start: int, stop: int | None = None) -> Read:
    """The rows on disk that are rows start..stop-1 (None: all) of the Hugging Face tensor `name`."""
    at = original_source(name, source.config) if source.layout == "original" else RowRange(name)
    return at.name, at.start + start, at.start + (source.stored(name).shape[0] if stop is None else stop)


# -- parts -------------------------------------------------------------------------------------------------------------
def _weight_name(spec: TensorSpec, source: Checkpoint, target: Target) -> str:
    """What the tensors of one weight that changes form share; the tensor's own name where it is copied."""
    if spec.role in ("expert weights", "expert scales"):
        changes = target.layout != "hf" or source.layout not in ("hf", "original")
    else:
        weight = ".self_attn." in spec.name and spec.name.endswith((".weight", ".weight_scale_inv"))
        changes = weight and (target.attention_fp8 or source.attention_fp8)
    endings = (".weight_scale_inv", ".weight", "_blocks", "_scales") if changes else ()
    return next((spec.name.removesuffix(ending) for ending in endings if spec.name.endswith(ending)), spec.name)


def _task(source: Checkpoint, target: Target, name: str, specs: tuple[TensorSpec, ...]) -> Task:
    first = specs[0]
    if first.role == "expert weights" and (target.layout != "hf" or source.layout not in ("hf", "original")):
        form, endings = {
            "hf": ("mxfp4", ("_blocks", "_scales")), "original": ("mxfp4", ("_blocks", "_scales")),
            "fp8": ("fp8", (".weight", ".weight_scale_inv")),
            "bf16": (f"bf16 {source.experts_order}", ("" if source.experts_order == "in_out" else ".weight",)),
        }[source.layout]
        pieces = tuple((expert, expert + 1) for expert in range(first.shape[0]))
        to = {"fp8": f"fp8 {target.scales}", "hf": "mxfp4", "bf16": f"bf16 {target.experts_order}"}[target.layout]
    elif name != first.name:
        form, endings = ("fp8", (".weight", ".weight_scale_inv")) if source.attention_fp8 else ("bf16", (".weight",))
        pieces, to = ((0, None),), f"fp8 {target.scales}" if target.attention_fp8 else "bf16"
    else:
        return _copy(source, name, first)
    return Task(name, f"{form} to {to}", tuple(name + ending for ending in endings), specs, pieces)


def _copy(source: Checkpoint, name: str, spec: TensorSpec) -> Task:
    stored = source.stored(name)
    if stored.shape != spec.shape or stored.dtype != spec.dtype:
        found, wanted = f"{stored.dtype} {list(stored.shape)}", f"{spec.dtype} {list(spec.shape)}"
        raise CheckpointError(f"{name} is {found}; {wanted} is expected")
    rows = spec.shape[0]
    step = max(1, _COPY_BYTES * rows // max(1, spec.nbytes))
    return Task(name, "copy", (name,), (spec,), tuple((a, min(rows, a + step)) for a in range(0, rows, step)))


def _convert(stored: Stored, spec: TensorSpec, target: Target, where: str) -> tuple[Parts, Report]:
    """To the form of `spec`, the first tensor of the weight."""
    if spec.dtype == "F8_E4M3":
        return to_fp8(stored, target.scales, where)
    if spec.dtype == "U8":
        return to_mxfp4(stored, where)
    order = "out_in" if spec.name.endswith(".weight") else "in_out"
    return to_bf16(stored, order, ".weight" if order == "out_in" else "", where)
