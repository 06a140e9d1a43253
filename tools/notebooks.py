"""Finding notebooks and executing them: what the other tools share."""
from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
TIMEOUT = 600        # seconds a cell may take where a GPU does the work; CI gives 120
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class CellFailed(RuntimeError):
    """A cell did not run to its end; the message shows the cell and what happened."""


def find(names: list[str], folder: Path = FOLDER) -> list[Path]:
    """The notebooks to work on, in order: those whose file name starts with one of `names`, or all.

    FileNotFoundError for a name that no notebook starts with, or where there is none at all.
    """
    every = sorted(folder.glob("*.ipynb"))
    missing = [name for name in names if not any(path.name.startswith(name) for path in every)]
    if missing or not every:
        there = ", ".join(path.name for path in every) or "none"
        raise FileNotFoundError(f"no notebook starts with {missing[0]!r}; there is {there}" if missing
                                else f"no notebooks in {folder.name}/")
    return [path for path in every if not names or any(path.name.startswith(name) for name in names)]


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = TIMEOUT) -> None:
    """Run all cells in a fresh kernel of this Python, in `folder`; outputs and counts are written into `notebook`.

    Widget state is dropped: the kernel that could use it is gone.
    CellFailed at the first cell that raises, takes longer than `timeout` seconds, or kills the kernel.
    """
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, extra_arguments=["--log-level=ERROR"],
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise CellFailed(_ANSI.sub("", str(error))) from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise CellFailed(f"{_running(notebook)}\n{_ANSI.sub('', str(error))}") from None
    finally:
        notebook.metadata.pop("widgets", None)


def headline(notebook: nbformat.NotebookNode) -> str:
    """The notebook's result in one line: the text printed by its cell tagged `headline`, or '' if there is none."""
    for cell in code_cells(notebook):
        if "headline" in cell.metadata.get("tags", []):
            text = "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
            return " ".join(text.split())
    return ""


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The code cells, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _running(notebook: nbformat.NotebookNode) -> str:
    """Source of the cell that was running: the first code cell without an execution count."""
    return next((cell.source for cell in code_cells(notebook) if cell.get("execution_count") is None), "")
