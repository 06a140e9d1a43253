"""`gptoss-lab inspect`, `synth` and `convert`: what is in a checkpoint, writing a random one, converting one."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import print_json, print_table, progress_bar
from gptoss_lab.config import ModelConfig

Spread = Annotated[
    int, typer.Option(help="Largest difference of exponents within a 128x128 block; over 14, FP8 must round.")
]
Scales = Annotated[
    Literal["pow2", "amax"], typer.Option(help="FP8: powers of two, exact where that is possible, or amax / 448.")
]
AttentionFp8 = Annotated[
    bool, typer.Option("--attention-fp8", help="QKV and output projection in FP8 too (rounds).")
]
ExpertsOrder = Annotated[Literal["out_in", "in_out"], typer.Option(help="bf16: axes of the experts' matrices.")]
LAYOUTS = {"hf": "MXFP4, Hugging Face", "original": "MXFP4, original", "fp8": "FP8 experts", "bf16": "bf16"}


def inspect(
    path: Annotated[Path | None, typer.Argument(help="Checkpoint folder, or a config.json.")] = None,
    preset: Annotated[str | None, typer.Option(help="gpt-oss-20b, gpt-oss-120b or nano, without any file.")] = None,
    json: options.Json = False,
) -> None:
    """Count tensors, bytes and parameters of a checkpoint, or of a known model; check that every tensor is there."""
    if (path is None) == (preset is None):
        raise typer.BadParameter("give either a checkpoint folder or --preset", param_hint="inspect")
    found: dict[str, Any] = {}
    if preset is not None:
        config = options.known_preset(preset)
    elif path.suffix == ".json":
        config = ModelConfig.load(path)
    else:
        config, found = _opened(path)
    report = {**summary(config), **found}
    if json:
        print_json(report)
    else:
        _print_summary(report)


def summary(config: ModelConfig) -> dict[str, Any]:
    """Everything that follows from a config: tensors and bytes in each layout, parameters, bytes by role."""
    from gptoss_lab.checkpoint.manifest import (
        bytes_by_role,
        count_active,
        count_parameters,
        manifest,
        parameters_by_role,
        total_bytes,
    )

    specs = {layout: manifest(config, layout) for layout in LAYOUTS}
    return {
        "config": asdict(config),
        "parameters": count_parameters(config),
        "active_parameters": count_active(config),
        "parameters_by_role": parameters_by_role(config),
        "layouts": {
            layout: {"tensors": len(own), "bytes": total_bytes(own), "bytes_by_role": bytes_by_role(own)}
            for layout, own in specs.items()
        },
    }


def _opened(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The config of a checkpoint whose every tensor was found as it should be, and what the files hold."""
    from gptoss_lab.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    return checkpoint.config, {"checkpoint": {
        "path": str(path), "layout": checkpoint.layout, "files": len(checkpoint.files),
        "tensors": len(checkpoint.specs), "bytes": checkpoint.nbytes,
    }}


def _print_summary(report: dict[str, Any]) -> None:
    config, layouts = report["config"], report["layouts"]
    if "checkpoint" in report:
        found = report["checkpoint"]
        print(f"{found['path']}: {found['layout']} layout, {found['tensors']} tensors in {found['files']} files, "
              f"{found['bytes']:,} bytes; every tensor is there with its shape and dtype")
    print("{name}: {num_layers} layers, {num_experts} experts ({experts_per_token} per token), hidden {hidden_size}, "
          "{num_heads} query and {num_kv_heads} KV heads".format_map(config))
    print("{parameters:,} parameters, {active_parameters:,} active per token (input embedding not counted)"
          .format_map(report))
    print_table("Layouts", ("layout", "", "tensors", "bytes"), [
        (layout, LAYOUTS[layout], own["tensors"], own["bytes"]) for layout, own in layouts.items()
    ])
    released, fp8 = layouts["hf"], layouts["fp8"]
    print_table("What the bytes are", ("", "parameters", "bytes, MXFP4", "share", "bytes, FP8 experts", "share"), [
        (role, report["parameters_by_role"].get(role), released["bytes_by_role"].get(role, 0),
         _share(released, role), fp8["bytes_by_role"].get(role, 0), _share(fp8, role))
        for role in released["bytes_by_role"]
    ])


def _share(layout: dict[str, Any], role: str) -> str:
    return f"{layout['bytes_by_role'].get(role, 0) / layout['bytes']:.1%}"


def synth(
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    preset: Annotated[str, typer.Option(help="gpt-oss-20b, gpt-oss-120b or nano.")] = "nano",
    config: Annotated[Path | None, typer.Option(help="A config.json instead of a preset.")] = None,
    layout: Annotated[Literal["hf", "original"], typer.Option(help="Names and files as in this release.")] = "hf",
    layers: Annotated[int | None, typer.Option(min=1, help="So many layers of the real shapes. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
    spread: Spread = 3,
    device: options.Device = "auto",
) -> None:
    """Write a random checkpoint in the released form: real shapes and value ranges, meaningless weights."""
    from gptoss_lab.checkpoint import synth as write
    from gptoss_lab.cli.loading import pick_device

    model = options.known_preset(preset) if config is None else ModelConfig.load(config)
    where = pick_device(device)
    with progress_bar(f"writing {target.name}") as progress:
        write(model, target, layout, seed, layers, spread=spread, device=where, progress=progress)
    _, found = _opened(target)
    print("{path}: {tensors} tensors in {files} files, {bytes:,} bytes".format_map(found["checkpoint"]))


def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder, any layout.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    to: Annotated[Literal["fp8", "bf16", "mxfp4"], typer.Option(help="Form of the experts.")] = "fp8",
    scales: Scales = "pow2",
    attention_fp8: AttentionFp8 = False,
    exact: Annotated[bool, typer.Option("--exact", help="Refuse as soon as a value would be rounded.")] = False,
    experts_order: ExpertsOrder = "out_in",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Convert a checkpoint, every tensor accounted for; its manifest.json says what became of each.

    A run that was killed is finished by the same command. Nothing that loads is left before all is written.
    """
    from gptoss_lab.checkpoint.convert import convert as run
    from gptoss_lab.cli.loading import pick_device

    where = pick_device(device)
    with progress_bar(f"converting to {to}") as progress:
        done = run(source, target, to, scales=scales, attention_fp8=attention_fp8, exact=exact,
                   experts_order=experts_order, device=where, progress=progress, workers=workers)
    if json:
        print_json({"path": str(done.path), "files_reused": done.reused, **done.totals})
        return
    print("{tensors_read} tensors, {bytes_read:,} bytes read; ".format_map(done.totals)
          + "{tensors_written} tensors, {bytes_written:,} bytes written to ".format_map(done.totals) + str(done.path))
    print(_exactness(done.totals))


def _exactness(totals: dict[str, Any]) -> str:
    """One line: whether values changed, and by how much at most."""
    if totals["weights_exact"] == totals["weights_converted"]:
        proof = f", proven in {totals['exact_blocks']:,} of {totals['blocks']:,} blocks" if totals["blocks"] else ""
        return f"exact: all {totals['weights_converted']} converted weights keep their values{proof}"
    rounded = totals["weights_converted"] - totals["weights_exact"]
    return (f"rounded: {rounded} of {totals['weights_converted']} converted weights, largest error "
            f"{totals['max_abs_error']:.3g}; manifest.json has the errors of each")
