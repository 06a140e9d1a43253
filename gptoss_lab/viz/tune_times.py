"""Before and after: each kernel launched as for 7168 and as chosen, from rows of `gptoss-lab bench tune`.

A case without rows says so. The two launches of a line were timed in turn in one run, on the same inputs; the gain is
their quotient, and where it is smaller than the spread of the readings the table says that it cannot be told apart.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go

from gptoss_lab.bench.tune_launches import CASES, Case, Launch, launches
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
COLUMNS = ("case", "launch", "made", "bound, us", "time, us", "% of bound", "against the chosen", "spread, %", "origin")


def readings(rows: Iterable[Row], case: Case) -> list[tuple[Launch, Row | None]]:
    """The launches of a case and the last row of each, None where nothing is recorded."""
    last = {row["backend"]: row for row in rows if row["suite"] == "profile" and row["case"] == case.name}
    return [(launch, last.get(launch.name)) for launch in launches(case)]


def launches_table(rows: Iterable[Row], cases: Iterable[Case] = CASES, origin: str = "recorded") -> Table:
    """One line per case and launch, the chosen one starred; "not recorded yet" where there is no row."""
    rows, lines = list(rows), []
    for case in cases:
        found = readings(rows, case)
        chosen = next((row["value"] for launch, row in found if launch.chosen and row), None)
        for launch, row in found:
            name = [case.name.removeprefix("tune: "), ("* " if launch.chosen else "") + launch.name, launch.made_for]
            lines.append(name + (["", "not recorded yet", "", "", "", ""] if row is None else _cells(row, chosen)
                                 + [origin]))
    return table(lines, COLUMNS)


def gains(rows: Iterable[Row], cases: Iterable[Case] = CASES) -> list[tuple[str, float, float]]:
    """(case, time as the first launch over time as chosen, larger spread of the two), where both are recorded."""
    rows, found = list(rows), []
    for case in cases:
        every = readings(rows, case)
        before = next((row for launch, row in every if not launch.chosen), None)
        after = next((row for launch, row in every if launch.chosen), None)
        if before and after and before["value"] and after["value"]:
            spread = max(before["spread"] or 0.0, after["spread"] or 0.0)
            found.append((case.name.removeprefix("tune: "), before["value"] / after["value"], spread))
    return found


def gains_figure(rows: Iterable[Row], origin: str = "recorded") -> go.Figure:
    """The gain of each case in per cent. ValueError where no case has both rows."""
    found = gains(rows)
    if not found:
        raise ValueError("gains_figure: no case is recorded both ways; run gptoss-lab bench tune")
    fig = go.Figure()
    fig.add_bar(y=[case for case, _, _ in found], x=[100 * (gain - 1) for _, gain, _ in found], orientation="h",
                marker={"color": [style.BLUE if abs(gain - 1) > spread else style.GREY for _, gain, spread in found]},
                hovertemplate="%{y}: %{x:.1f} %<extra></extra>")
    fig.update_xaxes(title_text="time saved over the first launch, % of the chosen one's")
    fig.update_yaxes(autorange="reversed")
    best = max(found, key=lambda one: one[1])
    return style.finish(fig, f"The largest gain is {best[0]}: {best[1]:.2f} times", origin,
                        "grey: within the spread of the readings", height=160 + 26 * len(found))


def _cells(row: Row, chosen: float | None) -> list[str]:
    """bound, time, per cent of the bound, against the chosen, spread."""
    bound = "" if row["bound"] is None else f"{row['bound']:,.1f}"
    if row["value"] is None:
        return [bound, f"failed: {row['conditions']['failed']}", "", "", ""]
    share = "" if row["bound"] is None else f"{100 * row['bound'] / row['value']:.0f}"
    against = "" if not chosen else f"{row['value'] / chosen:.3f}"
    return [bound, f"{row['value']:,.1f}", share, against, f"{100 * (row['spread'] or 0):.1f}"]
