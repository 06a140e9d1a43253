"""What commands print: results on stdout, everything else on stderr, as tables for people or JSON for programs."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def note(text: str) -> None:
    """One line on stderr."""
    print(one_line(text), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Text with all white space, line breaks too, as single blanks."""
    return " ".join(text.split())


def print_json(value: Any) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout: numbers to the right, whole ones with thousands separators; None as a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    filled = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                  show_header=any(columns))
    for position, column in enumerate(columns):
        number = any(isinstance(row[position], (int, float)) and not isinstance(row[position], bool) for row in filled)
        table.add_column(column, justify="right" if number else "left", no_wrap=number)
    for row in filled:
        table.add_row(*(Text(_shown(value)) for value in row))
    # A pipe has no width; without one rich folds lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr while the block runs, fed by (bytes done, bytes in all, what); none where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    title_column = TextColumn("{task.description}")
    columns = (title_column, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total)


def size(count: int) -> str:
    """Bytes with their unit: "13.76 GB" (10^9)."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count} B"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
