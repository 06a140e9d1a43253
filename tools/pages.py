"""A notebook as an HTML page with live plotly figures, readable without a network.

nbconvert leaves plotly outputs out, because they are stored as plotly's JSON only. Here each becomes a `div` drawn by
one copy of plotly's library that lies beside the pages.
"""
from __future__ import annotations

import copy
from pathlib import Path

import nbformat
import plotly.io
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

from tools.notebooks import PLOTLY, code_cells

LIBRARY = "plotly.min.js"


def write_page(notebook: nbformat.NotebookNode, target: Path) -> None:
    """Write `notebook` to the .html file `target`, and plotly's library beside it if it is not there."""
    library = target.with_name(LIBRARY)
    if not library.exists():
        library.write_text(get_plotlyjs(), encoding="utf-8")
    page = with_figures(notebook)
    urls = ("mathjax_url", "require_js_url", "mermaid_js_url", "mermaid_layout_elk_js_url")
    exporter = HTMLExporter(embed_images=True, **dict.fromkeys(urls, ""))
    body, _ = exporter.from_notebook_node(page, {"metadata": {"name": target.stem}})
    target.write_text(body, encoding="utf-8")


def with_figures(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy in which every plotly output is HTML; the first of them loads the library."""
    page = copy.deepcopy(notebook)
    head = f'<script src="{LIBRARY}"></script>'
    for cell in code_cells(page):
        for output in cell.outputs:
            figure = output.get("data", {}).get(PLOTLY)
            if figure is not None:
                drawn = plotly.io.to_html(figure, full_html=False, include_plotlyjs=False, validate=False)
                output.data = nbformat.from_dict({"text/html": head + drawn})
                head = ""
    return page
