"""Result rows as a table in which every number names the machine it was measured on.

Nothing here measures: rows come from `data/measured` (recorded) or from the user's `results/` folder, through the one
reader in `gptoss_lab.results`.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gptoss_lab.viz.table import Table, table

COLUMNS = ("origin", "suite", "case", "backend", "value", "unit", "% of bound", "conditions", "machine", "date")


def result_table(rows: Iterable[Mapping[str, Any]], origin: str = "recorded") -> Table:
    """One line per row: case, backend, value with unit, per cent of the bound, conditions, machine and date.

    rows: as `gptoss_lab.results.read_rows` returns them. A row that failed keeps its line and says why.
    """
    return table([_line(row, origin) for row in rows], COLUMNS)


def _line(row: Mapping[str, Any], origin: str) -> list[str]:
    value, bound = row["value"], row["bound"]
    conditions = {k: v for k, v in row["conditions"].items() if k != "failed"}
    shown = f"failed: {row['conditions']['failed']}" if value is None else f"{value:,.4g}"
    return [
        origin, row["suite"], row["case"], row["backend"], shown, row["unit"],
        share_of_bound(row["metric"], value, bound), ", ".join(f"{k} {v}" for k, v in conditions.items()),
        row["gpu"] or "CPU", row["date"],
    ]


def share_of_bound(metric: str, value: float | None, bound: float | None) -> str:
    """How much of the possible was reached, in per cent: bound / value for times, value / bound for rates; else ''."""
    if value is None or not value or bound is None:
        return ""
    times = metric in ("seconds", "ms_per_step", "microseconds", "bytes")
    return f"{100 * (bound / value if times else value / bound):.0f}"
