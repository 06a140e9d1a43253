"""The rules for a committed notebook, one small function each: a notebook in, what is wrong with it out.

A function yields one line per violation and nothing for a notebook that keeps the rule. `RULES` holds all of them.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import nbformat

from tools.notebooks import PLOTLY, code_cells, headline

Notebook = nbformat.NotebookNode
WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_LINES = 25
MOST_WIDTH = 100     # characters of a line that a page shows without cutting it off
_LOCAL = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users|tmp|mnt|opt|var|usr|srv|data|workspace)/\w|\b[A-Z]:\\\\?\w")
_BAR = re.compile(r"\r|\d+%\|")
_WIDGET_NAME = re.compile(r"^\w*\(children=|^\w+\(.*\)$", re.DOTALL)


def valid(notebook: Notebook) -> Iterator[str]:
    """The file follows the notebook format."""
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {str(error).splitlines()[0]}"


def kernel(notebook: Notebook) -> Iterator[str]:
    """It asks for the kernel that every installation has."""
    name = notebook.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"kernelspec is {name!r}; 'python3' is expected"


def counts(notebook: Notebook) -> Iterator[str]:
    """It was executed top to bottom in one go."""
    ran = [cell.get("execution_count") for cell in code_cells(notebook)]
    if ran != list(range(1, len(ran) + 1)):
        yield f"execution counts are {ran}; 1 to {len(ran)} in order are expected"


def errors(notebook: Notebook) -> Iterator[str]:
    """No stored output is an error or a complaint on stderr."""
    for number, output in _outputs(notebook):
        if output.output_type == "error":
            yield f"code cell {number} stores an error: {output.get('ename')}"
        elif output.get("name") == "stderr":
            yield f"code cell {number} stores text of stderr"


def stored(notebook: Notebook) -> Iterator[str]:
    """Outputs are stored, above all those that are checked."""
    cells = code_cells(notebook)
    if not any(cell.outputs for cell in cells):
        yield "no output is stored"
    for number, cell in enumerate(cells, 1):
        if "nbval-check-output" in cell.metadata.get("tags", []) and not cell.outputs:
            yield f"code cell {number} is checked by its output and stores none"


def widget_state(notebook: Notebook) -> Iterator[str]:
    """No widget state: without its `state` key the file counts as broken, and with it nothing shows it anyway."""
    if "widgets" in notebook.metadata:
        yield "metadata.widgets is stored"


def widget_fallback(notebook: Notebook) -> Iterator[str]:
    """A widget's output says in words or in a picture what it shows, and a static figure stands before it."""
    pictured = False
    for number, output in _outputs(notebook):
        data = output.get("data", {})
        if WIDGET in data:
            words = "".join(data.get("text/plain", "")).strip()
            if "image/png" not in data and (not words or _WIDGET_NAME.match(words)):
                yield f"code cell {number} has a widget without a sentence or picture for static readers"
            if not pictured:
                yield f"code cell {number} has a widget with no static figure before it"
        pictured = pictured or "image/png" in data or "text/html" in data


def pictures(notebook: Notebook) -> Iterator[str]:
    """Every plotly figure has its PNG beside it."""
    for number, output in _outputs(notebook):
        data = output.get("data", {})
        if PLOTLY in data and not data.get("image/png"):
            yield f"code cell {number} has a plotly figure without its PNG"


def local_paths(notebook: Notebook) -> Iterator[str]:
    """Nothing names a folder of the machine on which it ran."""
    for number, cell in enumerate(notebook.cells):
        if match := _LOCAL.search(cell.source):
            yield f"cell {number} names a local path in its source: {match.group()}..."
    for number, output in _outputs(notebook):
        for text in _texts(output):
            if match := _LOCAL.search(text):
                yield f"code cell {number} names a local path in its output: {match.group()}..."


def progress_bars(notebook: Notebook) -> Iterator[str]:
    """No progress bar was stored."""
    for number, output in _outputs(notebook):
        if any(_BAR.search(text) for text in _texts(output)):
            yield f"code cell {number} stores a progress bar"


def short_cells(notebook: Notebook) -> Iterator[str]:
    """Cells can be taken in at a glance."""
    for number, cell in enumerate(code_cells(notebook), 1):
        lines = len(cell.source.splitlines())
        if lines > MOST_LINES:
            yield f"code cell {number} has {lines} lines; at most {MOST_LINES} are expected"
        widest = max((len(line) for line in cell.source.splitlines()), default=0)
        if widest > MOST_WIDTH:
            yield f"code cell {number} has a line of {widest} characters; at most {MOST_WIDTH} are expected"


def no_definitions(notebook: Notebook) -> Iterator[str]:
    """Functions and classes live in the library, where tests cover them."""
    for number, cell in enumerate(code_cells(notebook), 1):
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            yield f"code cell {number} is not plain Python: {error.msg}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield f"code cell {number} defines {node.name}; definitions belong in the library"


def lesson(notebook: Notebook) -> Iterator[str]:
    """It opens with a prediction and ends with one takeaway and three exercises, folded and checked."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for heading in ("## Predict", "## Takeaway", "## Exercises"):
        found = sum(line.strip() == heading for line in text.splitlines())
        if found != 1:
            yield f"the heading {heading!r} occurs {found} times; once is expected"
    folds = text.count("<details>")
    checks = [c for c in code_cells(notebook) if "exercise" in c.metadata.get("tags", []) and "assert" in c.source]
    if folds != 3 or len(checks) != 3:
        yield f"{folds} folded answers and {len(checks)} cells that check them; three of each are expected"
    if any("\n\n" in fold for fold in re.findall(r"<details>.*?</details>", text, re.DOTALL)):
        yield "a folded answer has an empty line in it, where HTML pages end the fold; write it as one block"
    if not headline(notebook):
        yield "no cell tagged 'headline' prints the notebook's result"


RULES: tuple[Callable[[Notebook], Iterator[str]], ...] = (
    kernel, counts, errors, stored, widget_state, widget_fallback, pictures, local_paths, progress_bars,
    short_cells, no_definitions, lesson,
)


def problems(notebook: Notebook) -> list[str]:
    """Everything that is wrong with a notebook, one line each; empty if it may be committed.

    The other rules read what an invalid notebook may not have, so that is then the only one.
    """
    return list(valid(notebook)) or [line for rule in RULES for line in rule(notebook)]


def _outputs(notebook: Notebook) -> Iterator[tuple[int, Notebook]]:
    for number, cell in enumerate(code_cells(notebook), 1):
        for output in cell.get("outputs", []):
            yield number, output


def _texts(output: Notebook) -> Iterator[str]:
    """Every text in an output; pictures and figure JSON are not text."""
    yield "".join(output.get("text", ""))
    yield "\n".join(output.get("traceback", []))
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield "".join(value)
