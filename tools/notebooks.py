"""Finding notebooks and executing them: what the other tools share."""
from __future__ import annotations

import re
import time
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets import Type

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
TIMEOUT = 600        # seconds a cell may take where a GPU does the work; CI gives 120
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


LOOK_AGAIN = 1.0     # seconds


class Channel(AsyncZMQSocketChannel):
    """Looks again every second whether a message is there.

    A ZeroMQ socket in asyncio is woken once for what has arrived. Now and then that wake-up is lost, and a kernel's
    answer lies there until the time for the cell is over; a new look finds it.
    """

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message. timeout: seconds, None: no end. queue.Empty when they are over."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return await super().get_msg(min(left, LOOK_AGAIN))
            except Empty:
                if left <= LOOK_AGAIN:
                    raise


class Client(AsyncKernelClient):
    """A kernel's client with such channels."""

    shell_channel_class = Type(Channel)
    iopub_channel_class = Type(Channel)
    control_channel_class = Type(Channel)


class Manager(AsyncKernelManager):
    """Starts kernels and makes such clients."""

    client_factory = Type(Client)


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
        notebook, timeout=timeout, kernel_name="python3", kernel_manager_class=Manager,
        resources={"metadata": {"path": str(folder)}}, record_timing=False, extra_arguments=["--log-level=ERROR"],
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
