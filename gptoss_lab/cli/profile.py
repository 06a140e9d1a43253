"""`gptoss-lab profile`: where the time of one step goes, by kind of kernel, with the launch gaps."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.bench import Checkpoint, Experts, Layers, Model, Out, Projections, subject_of
from gptoss_lab.cli.output import note, print_table


def profile(
    model: Model = "gpt-oss-20b",
    phase: Annotated[Literal["prefill", "decode"], typer.Option(help="What step.")] = "prefill",
    tokens: Annotated[int, typer.Option(min=2, help="Of a prompt, or at which decode takes place.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    experts: Experts = "fp8",
    projections: Projections = "dense",
    layers: Layers = None,
    device: options.Device = "auto",
    checkpoint: Checkpoint = None,
    trace: Annotated[Path | None, typer.Option(help="Keep the trace: a .json or .json.gz file.")] = None,
    out: Out = Path("results/profile.jsonl"),
) -> None:
    """Trace one step and print where its time goes: kinds of kernels, launches, grids and blocks, gaps."""
    from gptoss_lab.bench.profile import run
    from gptoss_lab.results import write_rows

    subject = subject_of(model, layers, experts, projections, device, checkpoint)
    rows, kernels = run(subject, phase, tokens, batch, trace=trace)
    write_rows(out, rows)
    columns = ("kind", "launches", "us", "share", "largest launch", "grid", "block")
    print_table(f"{phase}, {tokens} tokens x {batch}: {len(kernels)} launches", columns, map(_cells, rows))
    note(f"rows added to {out}" + ("" if trace is None else f", trace in {trace}"))


def _cells(row: dict) -> tuple[object, ...]:
    of = row["conditions"]
    first = (of.get("shapes") or [{"name": None, "grid": None, "block": None}])[0]
    grid, block = ("x".join(map(str, first[key])) if first[key] else None for key in ("grid", "block"))
    kind = row["case"].split(": ", 1)[1]
    return kind, of["launches"], float(row["value"]), f"{of['share']:.1%}", (first["name"] or "")[:48], grid, block
