"""Pieces of the kernels' own source, side by side.

What: a kernel of the library as its text, cut to the lines that a lesson is about, and two such pieces next to each
other with highlighting.

How: the text is read from the module's file, so it is what runs, and can be shown where Triton is not installed. A
piece is named by words in its first and last line; if those words go, the lesson fails instead of showing other lines.
"""
from __future__ import annotations

import ast
import html
import importlib.util
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

FOLDER = "gptoss_kernels.attention"


def kernel_source(module: str, name: str) -> str:
    """The source of a function of gptoss_kernels.attention.<module>, from its `def` on.

    ValueError if there is no such module, or no such function in it.
    """
    found = importlib.util.find_spec(f"{FOLDER}.{module}")
    if found is None or found.origin is None:
        raise ValueError(f"there is no module {FOLDER}.{module}")
    text = Path(found.origin).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    raise ValueError(f"{module} has no function {name!r}")


def excerpt(text: str, first: str, last: str) -> str:
    """The lines from the one with the words `first` to the next one with `last`, dedented. ValueError if not there.

    Comments that stand far to the right are moved next to their line.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if first in line), None)
    if start is None:
        raise ValueError(f"no line has {first!r}")
    end = next((n for n in range(start, len(lines)) if last in lines[n]), None)
    if end is None:
        raise ValueError(f"no line from {lines[start].strip()!r} on has {last!r}")
    return textwrap.dedent("\n".join(re.sub(r"(?<=\S) {6,}#", "  #", line) for line in lines[start : end + 1]))


@dataclass(frozen=True)
class Piece:
    """A piece of source under a title. language: as pygments names it ("python", "cuda")."""

    title: str
    text: str
    language: str = "python"


@dataclass(frozen=True)
class SideBySide:
    """Pieces of source to look at, next to each other in a browser and below each other as text."""

    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return "\n\n".join(f"--- {piece.title}\n{piece.text}" for piece in self.pieces)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        formatter = HtmlFormatter(noclasses=True, nowrap=True)
        boxes = []
        for piece in self.pieces:
            code = highlight(piece.text, get_lexer_by_name(piece.language), formatter).rstrip("\n")
            boxes.append(
                '<div style="flex:1 1 420px;min-width:0"><div style="font-weight:600;margin-bottom:4px">'
                f'{html.escape(piece.title)}</div><pre style="margin:0;padding:8px 10px;overflow-x:auto;'
                f'background:#f7f9fa;color:#22303c;border:1px solid #e3e8ec;font:11px/1.4 monospace;'
                f'white-space:pre">{code}</pre></div>'
            )
        return f'<div style="display:flex;flex-wrap:wrap;gap:12px;text-align:left">{"".join(boxes)}</div>'


def side_by_side(*pieces: Piece) -> SideBySide:
    """The pieces next to each other."""
    return SideBySide(pieces)
