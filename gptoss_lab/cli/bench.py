"""`gptoss-lab bench`: measure on this machine. A suite is imported when it is asked for."""
from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note, print_table
from gptoss_lab.cli.speculation import bench_speculation

if TYPE_CHECKING:
    from gptoss_lab.bench.fast_model import Subject

bench = typer.Typer(help="Measure on this machine; one JSON line per row.")
Out = Annotated[Path, typer.Option(help="A .jsonl file that the rows are added to.")]
Model = Annotated[str, typer.Option(help="gpt-oss-20b, gpt-oss-120b or nano: whose shapes.")]
Layers = Annotated[int | None, typer.Option(min=1, help="So many layers of the real shapes. Default: all.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Readings of each case.")]
Scratch = Annotated[
    Path | None, typer.Option(help="Where large temporary files go. Default: the system's folder for them.")
]
Tokens = Annotated[list[int] | None, typer.Option(help="Prompt lengths of the forward; repeatable. Default: 512.")]
Experts = Annotated[Literal["fp8", "mxfp4", "dense"], typer.Option(help="Form of the expert weights.")]
Projections = Annotated[
    Literal["fp8", "dense"], typer.Option(help="QKV and output projection in FP8, or as the model's numbers.")
]
Checkpoint = Annotated[Path | None, typer.Option(help="Its weights. Default: random ones, made in memory.")]
Seconds = Annotated[float | None, typer.Option(min=1, help="Begin no case that would end later than this.")]
Check = Annotated[bool, typer.Option(help="First compare a few layers with the plain forward.")]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes; repeatable. Default: the table's.")]
KERNELS = {
    "attention": "Check, then time, attention with sinks on this GPU: every backend and its peers, interleaved.",
    "layer": "Check, then time, the small kernels and dense products of a layer on this GPU, in both forms.",
    "moe": "Check, then time, the mixture of experts on this GPU: every backend and its peers, interleaved.",
    "tune": "Check, then time, kernels on this GPU launched as for hidden size 7168 and as chosen for 2880.",
}
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
    tokens: Tokens = None,
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


@bench.command("prefill")
def bench_prefill(
    model: Model = "gpt-oss-20b",
    experts: Experts = "fp8",
    projections: Projections = "fp8",
    tokens: Annotated[list[int] | None, typer.Option(min=2, help="Prompt lengths; repeatable. Default: all.")] = None,
    batch: Batches = None,
    layers: Layers = None,
    repetitions: Repetitions = 5,
    seconds: Seconds = None,
    check: Check = True,
    device: options.Device = "auto",
    checkpoint: Checkpoint = None,
    out: Out = Path("results/prefill.jsonl"),
) -> None:
    """Time whole prompts, from token ids to logits, against the bound and the published times."""
    from gptoss_lab.bench import prefill

    cases = prefill.CASES
    if tokens or batch:
        cases = tuple(prefill.Prompt(n, b) for n in tokens or (8192,) for b in batch or (1,))
    _added(prefill.run(subject_of(model, layers, experts, projections, device, checkpoint), out, cases,
                       repetitions=repetitions, seconds=seconds, checked=check), out)


@bench.command("decode")
def bench_decode(
    model: Model = "gpt-oss-20b",
    experts: Experts = "fp8",
    projections: Projections = "dense",
    tokens: Annotated[list[int] | None, typer.Option(min=2, help="Lengths so far; repeatable. Default: all.")] = None,
    batch: Batches = None,
    layers: Layers = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 32,
    kv: Annotated[Literal["same", "fp8"], typer.Option(help="Keys and values: as the model's, or e4m3.")] = "same",
    seconds: Seconds = None,
    check: Check = True,
    device: options.Device = "auto",
    checkpoint: Checkpoint = None,
    out: Out = Path("results/decode.jsonl"),
) -> None:
    """Time steps of decode in CUDA graphs, host work included, against the bound."""
    from gptoss_lab.bench import decode

    cases = decode.CASES
    if tokens or batch:
        cases = tuple(decode.Batch(n, b) for n in tokens or (8192,) for b in batch or (1,))
    _added(decode.run(subject_of(model, layers, experts, projections, device, checkpoint), out, cases, steps=steps,
                      seconds=seconds, checked=check, kv_form=kv), out)


def _added(rows: Sequence[Any], out: Path) -> None:
    """What a bench says at its end that leaves out the cases its file holds."""
    note(f"rows added to {out}; what it held already was not measured again" if rows else
         f"{out} holds all of these cases already, so nothing was measured; remove it or name another --out")


def subject_of(
    model: str, layers: int | None, experts: str, projections: str, device: str, checkpoint: Path | None
) -> Subject:
    """What a bench of the fast forward measures, from the options of its command."""
    from gptoss_lab.bench.fast_model import Subject
    from gptoss_lab.checkpoint import open_checkpoint
    from gptoss_lab.cli.loading import pick_device

    config = options.known_preset(model) if checkpoint is None else open_checkpoint(checkpoint).config
    if layers is not None:
        if checkpoint is not None:
            raise typer.BadParameter("a checkpoint is measured whole", param_hint="--layers")
        config = config.with_layers(layers)
    return Subject(config, experts, projections, pick_device(device), checkpoint)


def _kernels(name: str) -> Callable[..., None]:
    """The command of a suite of kernels: `gptoss_lab.bench.<name>` with CASES, each with a name, and `run`."""

    def command(
        only: Annotated[str, typer.Option(help="Only cases whose name holds this.")] = "",
        repetitions: Repetitions = 9,
        out: Out = Path(f"results/{name}.jsonl"),
    ) -> None:
        suite = importlib.import_module(f"gptoss_lab.bench.{name}")
        suite.run(out, _chosen(suite.CASES, only), repetitions)
        note(f"rows added to {out}")

    return command


bench.command("speculation")(bench_speculation)
for _name, _help in KERNELS.items():
    if importlib.util.find_spec(f"gptoss_lab.bench.{_name}") is not None:
        bench.command(_name, help=_help)(_kernels(_name))


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

    columns = ("case", "backend", "metric", "value", "unit", "bound", "% of bound", "peer", "its value")
    print_table("Measured here", columns, map(_cells, rows))    # first, so that no reading is lost
    write_rows(out, rows)
    note(f"rows added to {out}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    """A row as it is shown."""
    peer = row["peer"] or {"name": None, "value": None}
    return (row["case"], row["backend"], row["metric"], _number(row["value"]), row["unit"], _number(row["bound"]),
            _reached(row), peer["name"], _number(peer["value"]))


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _reached(row: dict[str, Any]) -> str | None:
    """How near a value is to its bound, or why there is no value; None where there is no bound."""
    value, bound = row["value"], row["bound"]
    if value is None:
        return row["conditions"]["failed"]
    if not value or not bound:
        return None
    return f"{value / bound if row['metric'] in RATES else bound / value:.1%}"
