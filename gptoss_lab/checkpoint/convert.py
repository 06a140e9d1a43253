"""Convert a checkpoint to FP8, to bf16, or (back) to MXFP4 in the Hugging Face layout.

Streams: one file per layer, one expert at a time, several experts at once on several cores; memory does not grow with
layers. Every tensor of the target is planned from its manifest and every row of the source must be read exactly once,
or nothing is published. The default, MXFP4 to FP8 with power-of-two scales, changes no value of a block whose
exponents spread over at most 14 and says of every other block whether it did.

Written beside the weights: `config.json`, the index, and `manifest.json`: one row per tensor with where it came from,
the rule, exactness or measured error and sha256, and the totals. What is lost: nothing by the default; what amax
scales, `attention_fp8` and bf16 -> MXFP4 cost is measured.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.fp8 import SCALES
from gptoss_lab.checkpoint.manifest import BLOCK, TensorSpec, total_bytes
from gptoss_lab.checkpoint.reader import Checkpoint, open_checkpoint
from gptoss_lab.checkpoint.report import Report
from gptoss_lab.checkpoint.synth import Progress, write_index
from gptoss_lab.checkpoint.tasks import Read, Target, Task, check_reads, group_by_layer, place, plan_tasks
from gptoss_lab.checkpoint.workers import Workers
from gptoss_lab.checkpoint.workspace import Workspace
from gptoss_lab.checkpoint.writer import ShardWriter, write_json

MANIFEST_NAME = "manifest.json"
_LAYOUTS = {"fp8": "fp8", "bf16": "bf16", "mxfp4": "hf"}


@dataclass(frozen=True)
class Conversion:
    """A finished conversion. path: the new folder. rows, totals: as in its manifest.json. reused: files kept from a
    killed run.
    """

    path: Path
    rows: list[dict[str, Any]]
    totals: dict[str, Any]
    reused: int


def convert(
    source: str | Path, target: str | Path, to: str = "fp8", *, scales: str = "pow2", attention_fp8: bool = False,
    exact: bool = False, experts_order: str = "out_in", device: torch.device | str = "cpu",
    progress: Progress | None = None, workers: int | None = None,
) -> Conversion:
    """Convert the checkpoint at `source` into a new folder `target`.

    to: "fp8" (experts e4m3 in 128x128 blocks), "bf16" or "mxfp4". scales: of FP8, "pow2" (2^(e_max - 6), exact where
    it can be) or "amax" (amax / 448). attention_fp8: q, k, v and o weights in FP8 too (rounds). exact: refuse, naming
    the blocks, as soon as a value was really rounded. experts_order: of bf16, "out_in" ([E, out, in]) or "in_out"
    ([E, in, out], as transformers holds them). device: where values are converted; the result does not depend on it.
    progress(bytes written, bytes in all, tensor). workers: threads, default one per core.

    CheckpointError: a source that is not whole, a target that exists, no space, a full or failing disk, a scale byte
    255, options that do not fit together. A killed run leaves `<target>.partial`, which does not load; the same call
    again finishes it.
    """
    checkpoint, aim = open_checkpoint(source), _target(to, scales, attention_fp8, experts_order)
    _refuse_same_form(checkpoint, aim)
    specs, files = aim.specs(checkpoint), _name_files(group_by_layer(plan_tasks(checkpoint, aim)))
    _check_plan(specs, files)
    size = total_bytes(specs)
    plan = {"source": _fingerprint(checkpoint), "target": asdict(aim), "exact": exact, "files": list(files)}
    with Workspace(Path(target), plan, size) as space:
        job = _Job(checkpoint, aim, exact, device, workers, space, _Meter(progress, size))
        records, reused = [], 0
        for name, tasks in files.items():
            record = space.finished(name)
            reused += record is not None
            if record is None:
                record = job.write_file(name, tasks)
            else:
                job.meter.add(sum(row["bytes"] for row in record["rows"]), name)
            records.append(record)
        check_reads(checkpoint, (tuple(read) for record in records for read in record["reads"]))
        rows = [row for record in records for row in record["rows"]]
        totals = _totals(checkpoint, specs, rows)
        _write_metadata(space.folder, checkpoint, aim, files, rows, totals)
        space.publish()
    return Conversion(Path(target), rows, totals, reused)


class _Meter:
    """Counts written bytes for the progress callback."""

    def __init__(self, progress: Callable[[int, int, str], None] | None, size: int) -> None:
        self._progress, self._size, self._done = progress, size, 0

    def add(self, count: int, what: str) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._size, what)


@dataclass
class _Job:
    """What every file of one conversion shares."""

    source: Checkpoint
    target: Target
    exact: bool
    device: torch.device | str
    workers: int | None
    space: Workspace
    meter: _Meter

    def write_file(self, name: str, tasks: list[Task]) -> dict[str, Any]:
        """Write one file; returns its record: rows of the manifest, and what was read."""
        specs = [spec for task in tasks for spec in task.specs]
        pieces = [(task, piece) for task in tasks for piece in task.pieces]
        reports: dict[str, Report] = {}
        reads: list[Read] = []
        with Workers(self.device, self.workers) as workers, ShardWriter(self.space.folder / name, specs) as writer:
            for (task, piece), (parts, report) in zip(pieces, workers.in_order(self._run, pieces), strict=True):
                if report is not None:
                    self._take(reports, task.name, report)
                for tensor, data in parts.items():
                    writer.write(tensor, data)
                    self.meter.add(data.nbytes, tensor)
                reads += task.reads(self.source, piece)
            sums = writer.close()
        record = {"rows": [
            _row(self.source, task, spec, name, reports.get(task.name), sums) for task in tasks for spec in task.specs
        ], "reads": _merge(reads)}
        self.space.finish(name, record)
        return record

    def _run(self, item: tuple[Task, tuple[int, int | None]]) -> tuple[dict[str, torch.Tensor], Report | None]:
        task, piece = item
        parts, report = task.run(self.source, self.target, piece, self.device)
        return {name: data.cpu() for name, data in parts.items()}, report

    def _take(self, reports: dict[str, Report], name: str, report: Report) -> None:
        if self.exact and not report.exact:
            self.space.discard()
            raise CheckpointError(f"{name}: {report.complaint()}; convert without exact to accept it")
        if name in reports:
            reports[name].add(report)
        else:
            reports[name] = report


# -- plan --------------------------------------------------------------------------------------------------------------
def _target(to: str, scales: str, attention_fp8: bool, experts_order: str) -> Target:
    if to not in _LAYOUTS:
        raise CheckpointError(f"cannot convert to {to!r}; one of {', '.join(_LAYOUTS)} is expected")
    if scales not in SCALES:
        raise CheckpointError(f"no FP8 scales {scales!r}; one of {', '.join(SCALES)} is expected")
    for option, wrong in (
        ("attention_fp8", attention_fp8 and to != "fp8"), ("scales='amax'", scales != "pow2" and to != "fp8"),
        ("experts_order", experts_order != "out_in" and to != "bf16"),
    ):
        if wrong:
            raise CheckpointError(f"{option} does not belong to a conversion to {to!r}")
    return Target(_LAYOUTS[to], scales, attention_fp8, experts_order)


def _refuse_same_form(source: Checkpoint, target: Target) -> None:
    if source.layout == target.layout and (source.layout != "bf16" or source.experts_order == target.experts_order):
        order = f" with experts {source.experts_order}" if source.layout == "bf16" else ""
        raise CheckpointError(f"{source.path} is in the {source.layout} layout{order} already; nothing to convert")


def _name_files(groups: list[list[Task]]) -> dict[str, list[Task]]:
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _check_plan(specs: tuple[TensorSpec, ...], files: dict[str, list[Task]]) -> None:
    planned = [spec.name for tasks in files.values() for task in tasks for spec in task.specs]
    if sorted(planned) != sorted(spec.name for spec in specs):
        odd = sorted(set(planned) ^ {spec.name for spec in specs}) or ["a tensor planned twice"]
        raise CheckpointError(f"the plan does not fill the target's manifest: {odd[0]}")


def _fingerprint(source: Checkpoint) -> list[Any]:
    """Name, bytes and time of change of the source's files: enough to tell whether a rerun reads the same thing."""
    stats = [(file.name, file.stat()) for file in source.files]
    return [source.layout, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats], source.config.to_hf_dict()]


# -- manifest ----------------------------------------------------------------------------------------------------------
def _row(
    source: Checkpoint, task: Task, spec: TensorSpec, file: str, report: Report | None, sums: dict[str, str]
) -> dict[str, Any]:
    """One row of the manifest: a target tensor and where it came from. A weight's statistics stand in its first
    tensor's row.
    """
    origins = []
    for name in task.sources:
        on_disk, start, stop = place(source, name, 0)
        stored = source.stored(name)
        origins.append({
            "name": on_disk, "rows": [start, stop], "shape": list(stored.shape), "dtype": stored.dtype,
            "bytes": stored.stop - stored.start,
        })
    return {
        "source": origins, "rule": task.rule, "destination": spec.name, "file": file, "shape": list(spec.shape),
        "dtype": spec.dtype, "bytes": spec.nbytes, "exact": report is None or report.exact,
        "statistics": report.summary() if report is not None and spec is task.specs[0] else None,
        "sha256": sums[spec.name],
    }


def _merge(reads: list[Read]) -> list[Read]:
    """Join ranges that follow each other."""
    merged: list[Read] = []
    for name, start, stop in sorted(reads):
        if merged and merged[-1][0] == name and merged[-1][2] == start:
            merged[-1] = (name, merged[-1][1], stop)
        else:
            merged.append((name, start, stop))
    return merged


def _totals(source: Checkpoint, specs: tuple[TensorSpec, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    weights = [row for row in rows if row["statistics"] is not None]
    statistics = [row["statistics"] for row in weights]
    return {
        "tensors_read": len(source.specs), "bytes_read": source.nbytes,
        "tensors_written": len(rows), "bytes_written": sum(row["bytes"] for row in rows),
        "parameters": sum(spec.parameters for spec in specs),
        "weights_converted": len(weights), "weights_exact": sum(row["exact"] for row in weights),
        "blocks": sum(s.get("blocks", 0) for s in statistics),
        "exact_blocks": sum(s.get("exact_blocks", 0) for s in statistics),
        "wide_blocks": sum(s.get("wide_blocks", 0) for s in statistics),
        "max_abs_error": max((s["max_abs_error"] for s in statistics), default=0.0),
    }


def _write_metadata(
    folder: Path, source: Checkpoint, target: Target, files: dict[str, list[Task]], rows: list[dict[str, Any]],
    totals: dict[str, Any],
) -> None:
    write_index(folder, {name: [spec for task in tasks for spec in task.specs] for name, tasks in files.items()})
    write_json(folder / MANIFEST_NAME, {
        "model": source.config.name, "from": source.layout, "to": asdict(target), "totals": totals, "rows": rows,
    })
    write_json(folder / "config.json", _config(source, target))


def _config(source: Checkpoint, target: Target) -> dict[str, Any]:
    """config.json of the target: the released one, with what describes the form of its weights."""
    config = source.config.to_hf_dict()
    if target.layout == "hf":
        return config
    released = config.pop("quantization_config")
    config["dtype"] = "bfloat16"
    if target.layout == "fp8":
        kept = released["modules_to_not_convert"]
        if target.attention_fp8:
            kept = [name for name in kept if "self_attn" not in name]
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0" if target.scales == "pow2" else "float32", "modules_to_not_convert": kept,
        }
    return config
