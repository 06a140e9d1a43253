"""A table for a notebook: words to the left, numbers to the right, no row numbers, whole cells.

pandas holds the rows; only how they are shown differs from its own display, which cuts long cells and numbers the rows.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

_CELL = re.compile(r"<(t[dh])>(.*?)</\1>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d,.]+(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Table:
    """Rows to look at. frame: the data, for whoever wants to go on with it."""

    frame: pd.DataFrame

    def __str__(self) -> str:
        return self.frame.to_string(index=False, max_colwidth=None)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return _CELL.sub(_aligned, self.frame.to_html(index=False, border=0))


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> Table:
    """A `Table` of rows under named columns; whole numbers get thousands separators. rows may be empty."""
    shown = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    return Table(pd.DataFrame(shown, columns=list(columns)))


def _aligned(match: re.Match[str]) -> str:
    tag, text = match.groups()
    side = "right" if _NUMBER.fullmatch(text.strip()) else "left"
    return f'<{tag} style="text-align:{side}">{text}</{tag}>'
