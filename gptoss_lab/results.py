"""The result row: the one form in which a measurement is written, checked and read.

A number that the project shows was measured by a run, and the run left one JSON object per line in
`data/measured/<suite>/*.jsonl` with everything needed to doubt it: what was measured against which bound, beside which
peer, on which machine at which clocks, with which versions and command. One schema, one writer, one reader; notebooks,
README and the cost model read nothing else. A user's own runs go to `results/` and `difference` sets them beside ours.
"""
from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

SUITES = (
    "convert", "load", "attention", "moe", "prefill", "decode", "comm", "disaggregation", "speculation", "accuracy",
    "serve", "profile",
)
METRICS = (
    "seconds", "ms_per_step", "microseconds", "tflops", "gb_per_s", "tokens_per_second", "bytes", "accuracy", "kl",
    "loss",
)
_NUMBER_OR_NULL = {"type": ["number", "null"]}
_TEXT_OR_NULL = {"type": ["string", "null"]}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "suite", "case", "backend", "metric", "value", "unit", "bound", "conditions", "peer", "repetitions",
        "statistic", "raw", "spread", "gpu", "driver", "clocks", "versions", "commit", "date", "command",
    ],
    "properties": {
        "suite": {"enum": list(SUITES)},
        "case": {"type": "string", "minLength": 1},
        "backend": {"type": "string", "minLength": 1},
        "metric": {"enum": list(METRICS)},
        "value": _NUMBER_OR_NULL,          # null: the row failed or did not fit; conditions.failed says why
        "unit": {"type": "string", "minLength": 1},
        "bound": _NUMBER_OR_NULL,          # in `unit`: the best the datasheet allows, null where none is defined
        "conditions": {
            "type": "object",
            "properties": {
                "model": {"type": "string"}, "ep": {"type": "integer"}, "dp": {"type": "integer"},
                "tp": {"type": "integer"}, "batch": {"type": "integer"}, "tokens": {"type": "integer"},
                "failed": {"type": "string"},
            },
        },
        "peer": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object", "additionalProperties": False, "required": ["name", "value"],
                    "properties": {"name": {"type": "string"}, "value": {"type": "number"}},
                },
            ]
        },
        "repetitions": {"type": "integer", "minimum": 1},
        "statistic": {"enum": ["median", "mean", "min", "max", "single", "count"]},
        "raw": {"type": "array", "items": {"type": "number"}},
        "spread": _NUMBER_OR_NULL,         # (largest - smallest) / median of raw
        "gpu": _TEXT_OR_NULL,
        "driver": _TEXT_OR_NULL,
        "clocks": {"type": ["object", "null"]},
        "versions": {"type": "object"},
        "commit": _TEXT_OR_NULL,
        "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        "command": {"type": "string", "minLength": 1},
    },
}


@cache
def _validator() -> Any:
    """Imported when the first row is checked: the library takes a second, and most processes check none."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator(SCHEMA)


class ResultError(ValueError):
    """A row that does not fit the schema, or a file that is not made of rows."""


def validate(row: Mapping[str, Any]) -> None:
    """ResultError, naming the key, unless `row` fits the schema and its numbers are finite."""
    error = next(iter(sorted(_validator().iter_errors(dict(row)), key=lambda e: list(map(str, e.path)))), None)
    if error is not None:
        where = ".".join(map(str, error.path)) or "row"
        raise ResultError(f"result {where}: {error.message}")
    for key in ("value", "bound", "spread"):
        if row[key] is not None and not math.isfinite(row[key]):
            raise ResultError(f"result {key} is {row[key]}; a finite number or null is expected")
    if row["value"] is None and "failed" not in row["conditions"]:
        raise ResultError("result value is null; conditions.failed must say why")


def make_row(
    suite: str,
    case: str,
    backend: str,
    metric: str,
    raw: Iterable[float],
    unit: str,
    *,
    statistic: str = "median",
    bound: float | None = None,
    peer: tuple[str, float] | None = None,
    clocks: Mapping[str, float] | None = None,
    failed: str | None = None,
    **conditions: Any,
) -> dict[str, Any]:
    """One row from the raw readings of a run, with this machine's provenance filled in.

    raw: readings in `unit`; `value` is their `statistic`, `spread` their range over the median. failed: why there is no
    value (raw is then empty). conditions: model, ep, dp, tp, batch, tokens, and whatever else matters.
    """
    readings = [float(x) for x in raw]
    if failed is not None:
        conditions["failed"] = failed
    elif not readings:
        raise ResultError(f"result {case}: no readings; a row without any must say why with failed=")
    row = {
        "suite": suite, "case": case, "backend": backend, "metric": metric,
        "value": None if failed is not None else _statistic(statistic, readings),
        "unit": unit, "bound": bound, "conditions": conditions,
        "peer": None if peer is None else {"name": peer[0], "value": peer[1]},
        "repetitions": max(1, len(readings)), "statistic": statistic, "raw": readings,
        "spread": _spread(readings), "clocks": None if clocks is None else dict(clocks), **provenance(),
    }
    validate(row)
    return row


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]], append: bool = True) -> None:
    """Write rows to a .jsonl file, one per line, all or none: every row is validated before the file is touched."""
    checked = list(rows)
    for row in checked:
        validate(row)
    file = Path(path)
    if file.suffix != ".jsonl":
        raise ResultError(f"results are written to a .jsonl file, not {file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text(encoding="utf-8") if append and file.exists() else ""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(before + "".join(json.dumps(row) + "\n" for row in checked), encoding="utf-8")
    temporary.replace(file)


def read_rows(path: str | Path, **where: Any) -> list[dict[str, Any]]:
    """Rows of a .jsonl file, or of every one below a folder, in file order.

    where: keep rows whose key, or whose condition of that name, equals the value (`suite="moe"`, `tokens=8192`).
    ResultError names file and line of what is not a row. A folder without results gives an empty list.
    """
    root = Path(path)
    files = [root] if root.suffix == ".jsonl" else sorted(root.rglob("*.jsonl"))
    rows = [row for file in files for row in _read_file(file)]
    return [row for row in rows if all(row.get(k, row["conditions"].get(k)) == v for k, v in where.items())]


def recorded_folder() -> Path:
    """`data/measured` of this checkout: the project's own runs. Only a deliberate command writes there."""
    return Path(__file__).resolve().parent.parent / "data" / "measured"


MEETING = ("model", "layers", "ep", "dp", "tp", "sequence_split", "batch", "tokens")
"""Conditions by which rows meet."""


def difference(ours: Iterable[Mapping[str, Any]], yours: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Set a user's rows beside the recorded ones.

    Rows meet when suite, case, backend, metric and the conditions of MEETING agree; the last row of a meeting counts.
    Returns one dict per meeting of the user's rows: those keys, unit, recorded, yours, ratio (yours / recorded, None
    where either is missing), recorded_on and yours_on (GPU or "CPU").
    """
    recorded = {_identity(row): row for row in ours}
    result = []
    for key, row in {_identity(row): row for row in yours}.items():
        match = recorded.get(key)
        a, b = (match or {}).get("value"), row["value"]
        result.append({
            "suite": row["suite"], "case": row["case"], "backend": row["backend"], "metric": row["metric"],
            **{name: row["conditions"].get(name) for name in MEETING}, "unit": row["unit"], "recorded": a, "yours": b,
            "ratio": b / a if a and b is not None else None,
            "recorded_on": (match["gpu"] or "CPU") if match else None, "yours_on": row["gpu"] or "CPU",
        })
    return result


@cache
def _static_provenance() -> dict[str, Any]:
    gpu, driver = _gpu()
    names = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "transformers", "gptoss-lab")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"gpu": gpu, "driver": driver, "versions": versions, "commit": _commit()}


def provenance() -> dict[str, Any]:
    """Where a row was measured: gpu, driver, versions, commit, date, command. The command's paths are shortened."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    command = shown_command([program, *sys.argv[1:]])
    return {**_static_provenance(), "date": date.today().isoformat(), "command": command}


def shown_command(words: Iterable[str]) -> str:
    """A command line as it may be shown: of an absolute path only the last part."""
    return shlex.join(Path(word).name if os.path.isabs(word) else word for word in words)


def _gpu() -> tuple[str | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None, None
    name, driver = (part.strip() for part in line.rsplit(",", 1))
    return name, driver


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=20, check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GPTOSS_LAB_COMMIT")
    return done.stdout.strip()


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    conditions = row["conditions"]
    return (row["suite"], row["case"], row["backend"], row["metric"],
            *(conditions.get(k) or None for k in MEETING))              # without a split and never asked: the same


def _statistic(kind: str, readings: list[float]) -> float:
    ordered = sorted(readings)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    values = {
        "median": median, "mean": sum(ordered) / len(ordered), "min": ordered[0], "max": ordered[-1],
        "single": readings[0], "count": readings[0],
    }
    if kind not in values:
        raise ResultError(f"result statistic is {kind!r}; one of {', '.join(values)} is expected")
    return values[kind]


def _spread(readings: list[float]) -> float | None:
    if len(readings) < 2:
        return None
    median = _statistic("median", readings)
    return (max(readings) - min(readings)) / median if median else None


def _read_file(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultError(f"cannot read results from {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ResultError(f"cannot read results from {file}: it is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ResultError("a JSON object is expected")
            validate(row)
        except (json.JSONDecodeError, ResultError) as error:
            raise ResultError(f"{file}, line {number}: {error}") from None
        rows.append(row)
    return rows
