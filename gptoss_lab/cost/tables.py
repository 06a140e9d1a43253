"""CSV files of data/published: read whole, and refused with file and line where they are not as expected."""
from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gptoss_lab.cost.errors import CostError

Entry = TypeVar("Entry")


def published_file(name: str) -> Path:
    """`data/published/<name>` of this checkout."""
    return Path(__file__).resolve().parents[2] / "data" / "published" / name


def read_table(
    file: Path, columns: Sequence[str], parse: Callable[[Path, int, Mapping[str, str]], Entry], what: str
) -> list[Entry]:
    """The lines in file order. parse(file, line number, values by column). what: the file in an error ("the figures").

    CostError for other columns, or a file that cannot be read; whatever `parse` raises.
    """
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != tuple(columns):
                raise CostError(f"{file.name} has the columns {reader.fieldnames}; {', '.join(columns)} are expected")
            return [parse(file, number, raw) for number, raw in enumerate(reader, start=2)]
    except OSError as error:
        raise CostError(f"cannot read {what} {file.name}: {error.strerror}") from None
