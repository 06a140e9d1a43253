"""`gptoss-lab results`: a user's measurements beside the recorded ones."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import print_json, print_table

results = typer.Typer(help="Measurements: yours beside the recorded ones.")
Folder = Annotated[Path, typer.Option(help="Where your own rows are (.jsonl files, or a folder of them).")]


@results.callback()
def _results() -> None:
    """Measurements: yours beside the recorded ones."""


@results.command("diff")
def difference(folder: Folder = Path("results"), json: options.Json = False) -> None:
    """Show your measurements beside the recorded ones: the same case, model and sizes, and the ratio."""
    from gptoss_lab import results as library

    yours = library.read_rows(folder)
    if not yours:
        raise ValueError(f"no result rows in {folder}; `gptoss-lab bench` writes them, --folder says where they are")
    rows = library.difference(library.read_rows(library.recorded_folder()), yours)
    if json:
        print_json(rows)
        return
    print_table(
        "Recorded (data/measured) and yours",
        ("suite", "case", "backend", "conditions", "metric", "unit", "recorded", "yours", "ratio", "recorded on",
         "yours on"),
        [(*(row[key] for key in ("suite", "case", "backend")), _conditions(row), row["metric"], row["unit"],
          *(None if row[key] is None else float(row[key]) for key in ("recorded", "yours", "ratio")),
          row["recorded_on"], row["yours_on"]) for row in rows],
    )


def _conditions(row: dict) -> str:
    """Of what model, plan and sizes a row is, as far as it says: "gpt-oss-20b, EP2 DP1 TP2, batch 8, tokens 8192"."""
    plan = " ".join(f"{name.upper()}{row[name]}" for name in ("ep", "dp", "tp") if row[name] is not None)
    sizes = [f"{name} {row[name]}" for name in ("layers", "batch", "tokens") if row[name] is not None]
    return ", ".join(filter(None, [row["model"], plan + (" SP" if row["sequence_split"] else ""), *sizes]))
