"""Execute the notebooks in order and say in one line each how long it took and what came out.

    python -m tools.run_notebooks [NAME ...] [--output build] [--timeout 600]

Writes each executed notebook and an HTML page of it to the output folder. Stops at the first cell that fails, shows
the cell, and ends with 1. The notebooks in `notebooks/` are not touched.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat

from tools.notebooks import FOLDER, TIMEOUT, CellFailed, execute, find, headline
from tools.pages import write_page


def run_all(paths: list[Path], output: Path, timeout: int = TIMEOUT) -> None:
    """Execute `paths` into the folder `output`, printing a line for each. CellFailed at the first failing cell."""
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for path in paths:
        begin = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook, path.parent, timeout)
        finally:
            nbformat.write(notebook, output / path.name)
        write_page(notebook, output / f"{path.stem}.html")
        print(f"{path.stem:<18} {time.perf_counter() - begin:6.1f} s  {headline(notebook)}", flush=True)
    print(f"{len(paths)} notebooks ran in {time.perf_counter() - started:.1f} s; pages in {output.name}/", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="execute the notebooks in order")
    parser.add_argument("names", nargs="*", help="starts of file names, such as 01 (default: all)")
    parser.add_argument("--output", type=Path, default=FOLDER.parent / "build")
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds a cell may take")
    given = parser.parse_args(arguments)
    try:
        run_all(find(given.names), given.output, given.timeout)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CellFailed as error:
        print(f"a cell failed:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
