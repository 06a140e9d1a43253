"""Check in a pytest report that every code cell of every notebook was run: a test that silently ran nothing must fail.

    pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=120 --junitxml=build/nbval.xml notebooks
    python -m tools.check_ran build/nbval.xml

Ends with 1 if a cell is missing from the report or was skipped. Whether cells passed is pytest's own exit status.
"""
from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import nbformat

from tools.notebooks import FOLDER, code_cells, find


def cells_run(report: Path) -> Counter[str]:
    """How many cells of each notebook (by file name) a JUnit report shows as run, skipped ones not counted.

    ValueError if the file is not a JUnit report.
    """
    try:
        root = xml.parse(report).getroot()
    except (OSError, xml.ParseError) as error:
        raise ValueError(f"{report.name} is not a pytest report: {error}") from None
    ran: Counter[str] = Counter()
    for case in root.iter("testcase"):
        place = case.get("classname", "")
        if place.endswith(".ipynb") and case.find("skipped") is None:
            ran[place.removesuffix(".ipynb").rsplit(".", 1)[-1] + ".ipynb"] += 1
    return ran


def missing(report: Path, folder: Path = FOLDER) -> list[str]:
    """One line per notebook of which a cell was not run; empty if all of them were."""
    ran = cells_run(report)
    lines = []
    for path in find([], folder):
        wanted = len(code_cells(nbformat.read(path, as_version=4)))
        if ran[path.name] < wanted:
            lines.append(f"{path.name}: {ran[path.name]} of {wanted} cells were run")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="check that every notebook cell was run")
    parser.add_argument("report", type=Path, help="the file that pytest --junitxml wrote")
    given = parser.parse_args(arguments)
    try:
        lines = missing(given.report)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    total = sum(cells_run(given.report).values())
    print("\n".join(lines) or f"every notebook cell was run: {total}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
