"""Execute notebooks and write them back for committing: outputs, counts from 1, a PNG beside every plotly figure.

    python -m tools.store_notebooks [NAME ...] [--timeout 600]

The PNGs are made after execution, by kaleido, which needs Chromium; a cell never needs a browser. A notebook that
would break a rule (tools/rules.py: local paths, progress bars, errors and so on) is not written.
"""
from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kaleido
import nbformat
import plotly.graph_objects as go

from tools.notebooks import PLOTLY, TIMEOUT, CellFailed, code_cells, execute, find
from tools.rules import problems

LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}


class NotStored(ValueError):
    """The executed notebook breaks a rule; nothing was written."""


def store(path: Path, draw: Callable[[dict], bytes], timeout: int = TIMEOUT) -> None:
    """Execute the notebook at `path` and replace it by the result, whole or not at all.

    draw: plotly JSON to PNG bytes. CellFailed if a cell fails, NotStored if the result breaks a rule.
    """
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, path.parent, timeout)
    clean(notebook)
    add_pictures(notebook, draw)
    broken = problems(notebook)
    if broken:
        raise NotStored(f"{path.name} is not stored: " + "; ".join(broken))
    temporary = path.with_name(f".{path.name}.part")
    nbformat.write(notebook, temporary)
    temporary.replace(path)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drop what differs from run to run or machine to machine: widget state, the exact Python, cell metadata."""
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": LANGUAGE,
    })
    for cell in notebook.cells:
        kept = {key: value for key, value in cell.metadata.items() if key in ("tags", "jupyter")}
        cell.metadata = nbformat.from_dict(kept)


def add_pictures(notebook: nbformat.NotebookNode, draw: Callable[[dict], bytes]) -> None:
    """Put a PNG beside every plotly output."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            figure = output.get("data", {}).get(PLOTLY)
            if figure is not None:
                output.data["image/png"] = base64.b64encode(draw(figure)).decode("ascii")


@contextmanager
def browser() -> Iterator[Callable[[dict], bytes]]:
    """A function from plotly JSON to PNG bytes, drawn by one Chromium for all figures."""
    kaleido.start_sync_server(silence_warnings=True)
    try:
        yield _draw
    finally:
        kaleido.stop_sync_server()


def _draw(figure: dict) -> bytes:
    shown = go.Figure(data=figure["data"], layout=figure["layout"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figure.png"
        kaleido.write_fig_sync(shown, path=str(file), opts={"format": "png", "scale": 1})
        return file.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="execute notebooks and write them back for committing")
    parser.add_argument("names", nargs="*", help="starts of file names, such as 01 (default: all)")
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds a cell may take")
    given = parser.parse_args(arguments)
    try:
        with browser() as draw:
            for path in find(given.names):
                store(path, draw, given.timeout)
                print(f"{path.name} stored, {path.stat().st_size / 1e6:.2f} MB", flush=True)
    except (FileNotFoundError, CellFailed, NotStored) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
