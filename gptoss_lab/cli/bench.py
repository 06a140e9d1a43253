"""`gptoss-lab bench`: measure on this machine. Each suite is imported when it is asked for, and says itself what it measures."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note, print_table

bench = typer.Typer(help="Measure on this machine; one JSON line per row.")
Out = Annotated[Path, typer.Option(help="A .jsonl file that the rows are added to.")]
Model = Annotated[str, typer.Option(help="gpt-oss-20b, gpt-oss-120b or nano: whose shapes.")]
Layers = Annotated[int | None, typer.Option(min=1, help="So many layers of the real shapes. Default: all.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Readings of each case.")]
Scratch = Annotated[Path | None, typer.Option(help="Where large temporary files go. Default: the system's folder for them.")]
RATES = ("tflops", "gb_per_s", "tokens_per_second", "accuracy")
"""Metrics of which more is better."""


@bench.command("convert")
def bench_convert(
    model: Model = "gpt-oss-20b",
    layers: Layers = 4,
    repetitions: Repetitions = 3,
    scales: Annotated[Literal["pow2", "amax"], typer.Option(help="Of the FP8 blocks.")] = "pow2",
    device: options.Device = "auto",
    scratch: Scratch = None,
    out: Out = Path("results/convert.jsonl"),
) -> None:
    """Time a conversion to FP8 against a plain copy of the bytes it writes, and its memory above start."""
    from gptoss_lab.bench.convert import bench as measure
    from gptoss_lab.cli.loading import pick_device

    whole, where = options.known_preset(model), str(pick_device(device))
    alone = replace(whole, name=f"{whole.name} without embeddings", vocab_size=128)
    folder, rows = scratch or Path(tempfile.gettempdir()), []
    for config, case in ((alone, "mxfp4 to fp8, layers alone"), (whole, "mxfp4 to fp8, whole")):
        rows += measure(config, folder, layers or config.num_layers, repetitions, where, scales, case)
    _finish(rows, out)


@bench.command("whole")
def bench_whole(
    model: Model = "gpt-oss-20b",
    layers: Layers = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Prompt lengths of the forward; repeatable. Default: 512.")] = None,
    device: options.Device = "auto",
    scratch: Scratch = None,
    out: Out = Path("results/whole.jsonl"),
) -> None:
    """Write, convert, load and run a whole model of the real shapes: time and peak memory of each."""
    from gptoss_lab.bench.whole import bench as measure
    from gptoss_lab.cli.loading import pick_device

    config, where = options.known_preset(model), str(pick_device(device))
    config = config if layers is None else config.with_layers(layers)
    _finish(measure(config, scratch or Path(tempfile.gettempdir()), where, tuple(tokens or (512,))), out)


@bench.command("attention")
def bench_attention(
    only: Annotated[str, typer.Option(help="Only cases whose name holds this, such as decode/full.")] = "",
    repetitions: Repetitions = 9,
    out: Out = Path("results/attention.jsonl"),
) -> None:
    """Check, then time, attention with sinks on this GPU: every backend and its peers, interleaved."""
    from gptoss_lab.bench import attention as suite

    suite.run(out, _chosen(suite.CASES, only), repetitions)
    note(f"rows added to {out}")


def _chosen(cases: Sequence[Any], only: str) -> list[Any]:
    """The cases whose name holds `only`; none is a wrong command line."""
    chosen = [case for case in cases if only in case.name]
    if not chosen:
        known = ", ".join(sorted({case.name for case in cases}))
        raise typer.BadParameter(f"no case holds {only!r}; there are {known}", param_hint="--only")
    return chosen


def _finish(rows: list[dict[str, Any]], out: Path) -> None:
    """Write the rows and print them: value, bound and how much of it was reached, peer."""
    from gptoss_lab.results import write_rows

    write_rows(out, rows)
    print_table("Measured here", ("case", "backend", "metric", "value", "unit", "bound", "% of bound", "peer", "its value"), [
        (row["case"], row["backend"], row["metric"], _number(row["value"]), row["unit"], _number(row["bound"]), _reached(row),
         *((row["peer"]["name"], _number(row["peer"]["value"])) if row["peer"] else (None, None))) for row in rows
    ])
    note(f"rows added to {out}")


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _reached(row: dict[str, Any]) -> str | None:
    """How near a value is to its bound; None where either is missing."""
    value, bound = row["value"], row["bound"]
    if not value or not bound:
        return None
    return f"{value / bound if row['metric'] in RATES else bound / value:.1%}"
