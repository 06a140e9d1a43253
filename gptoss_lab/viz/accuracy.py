"""What precision costs: the rows of the accuracy study as dots with their intervals, and as a table.

What: result rows of the suite "accuracy" (`python -m gptoss_lab.train.study` writes them; recorded ones are in
data/measured): for each variant of the trained nano how many held-out problems it answers right, how far its odds are
from the baseline's, how many answers and experts stay the same.

How: one measure is one figure, a dot and a bar for each variant and the baseline as a line with its own interval as a
band. A point at 0 cannot stand on the logarithmic axis of the KL: it is drawn as an open mark at the left edge and its
text says 0. Intervals overlap the baseline's easily although the same problems were answered; the paired test in the
table is what decides.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import plotly.graph_objects as go

from gptoss_lab.train.study.names import BASELINE, CONTROL, EXACT, EXPERTS, FAR, KL, LOSS, SAME
from gptoss_lab.train.study.verdicts import ANSWERS, effects, verdicts
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
MEASURES = {
    EXACT: "problems answered exactly right, %", FAR: "lists beyond 4,096 tokens recalled right, %",
    SAME: "prompts answered token by token as the baseline, %",
    EXPERTS: "the same experts as the baseline, % of tokens and layers",
    LOSS: "loss on the right answers, nats per token", KL: "KL to the baseline, nats per token",
}
"""Case of the rows -> what its axis says."""
NONE_YET = "not recorded yet"
COLUMNS = ("variant", "right, %", "95 % interval", "against baseline, points", "p", "same tokens, %", "KL, nats",
           "perplexity", "same experts, %", "origin")


def latest(rows: Iterable[Row], case: str) -> dict[str, Row]:
    """Variant -> its last row of a measure with a value, in the order in which variants first came."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["suite"] == "accuracy" and row["case"] == case and row["value"] is not None:
            found[row["backend"]] = row
    return found


def dots(rows: Iterable[Row], case: str) -> list[tuple[str, float, float, float]]:
    """(variant, value, low, high) of a measure: shares in per cent, an interval without ends from value to value."""
    factor = 100.0 if case in (EXACT, FAR, SAME, EXPERTS) else 1.0
    return [
        (name, factor * row["value"], factor * row["conditions"].get("low", row["value"]),
         factor * row["conditions"].get("high", row["value"]))
        for name, row in latest(rows, case).items()
    ]


def dots_figure(
    rows: Iterable[Row], case: str = EXACT, origin: str = "recorded", variants: Collection[str] = (),
) -> go.Figure:
    """One measure of every variant with its 95 % interval, the baseline as a line. Without rows it says so.

    rows: of the whole study, by which each variant is judged. case: a key of MEASURES; ValueError for another.
    variants: draw these alone, beside what they are judged by (default: all).
    """
    if case not in MEASURES:
        raise ValueError(f"no measure is called {case!r}; there are {', '.join(MEASURES)}")
    rows = list(rows)
    judged = {name for name, effect in effects(rows).items() if effect.changes == ANSWERS}
    rows = only(rows, *variants) if variants else rows
    found = dots(rows, case)
    fig = go.Figure()
    if not found:
        fig.add_annotation(text=NONE_YET, showarrow=False, font={"size": 20, "color": style.MUTED})
        fig.update_xaxes(visible=False)
        fig.update_yaxes(visible=False)
        return style.finish(fig, f"{case.capitalize()}: {NONE_YET}", origin, "no row of the accuracy study", height=220)
    logarithmic = case == KL
    if logarithmic:
        found = _on_a_log_axis(found)
    for name, value, low, high in found:
        _draw(fig, name, value, low, high, case)
    base = next((row for row in found if row[0] == BASELINE), None)
    if base is not None:
        fig.add_vline(x=base[1], line={"color": style.BLUE, "width": 1, "dash": "dot"})
        fig.add_vrect(x0=base[2], x1=base[3], fillcolor=style.BLUE, opacity=0.08, line_width=0)
    fig.update_xaxes(title_text=MEASURES[case])
    if logarithmic:
        fig.update_xaxes(type="log", dtick=1, exponentformat="power")
    fig.update_yaxes(categoryorder="array", categoryarray=[name for name, *_ in found][::-1], title_text="")
    return style.finish(fig, _finding(rows, case, judged), origin, source(rows), showlegend=False,
                        height=190 + 28 * len(found), margin={"l": 190})


def accuracy_table(rows: Iterable[Row], origin: str = "recorded") -> Table:
    """One line for each variant, the baseline first; one line that says so where nothing is recorded."""
    rows = list(rows)
    by_case = {case: latest(rows, case) for case in MEASURES}
    names = list(by_case[EXACT])
    lines = [[name, *_numbers(by_case, name), origin] for name in sorted(names, key=lambda n: n != BASELINE)]
    return table(lines or [[NONE_YET, *[""] * (len(COLUMNS) - 1)]], COLUMNS)


def only(rows: Iterable[Row], *variants: str) -> list[Row]:
    """The rows of these variants, and of the two that they are judged by: the baseline, and itself in other batches."""
    return [row for row in rows if row["suite"] == "accuracy" and row["backend"] in (BASELINE, CONTROL, *variants)]


def effects_table(rows: Iterable[Row], *variants: str, origin: str = "recorded") -> Table:
    """What each of these variants changes, by the rule of the study, and the numbers; `NONE_YET` for one without."""
    found = effects(rows)
    lines = [[name, found[name].changes, found[name].words, origin] if name in found else [name, NONE_YET, "", ""]
             for name in variants]
    return table(lines, ["variant", "changes", "how", "origin"])


def verdict_table(rows: Iterable[Row], *variants: str, origin: str = "recorded") -> Table:
    """The post's claims: whether each shows in these rows, and the numbers. variants: only what these test."""
    words = {True: "yes", False: "no", None: "open"}
    return table([[v.claim.says, words[v.shows], v.sentence.removeprefix(f"{v.claim.says}: "), origin]
                  for v in verdicts(rows) if not variants or v.claim.variant in variants],
                 ["claim", "shows", "how", "origin"])


def source(rows: Iterable[Row]) -> str:
    """Which checkpoint and how many problems the last baseline is of, in a line."""
    base = latest(rows, EXACT).get(BASELINE)
    if base is None:
        return "no baseline"
    found = base["conditions"]
    return (f"{found['model']}, weights {found['checkpoint']}; {found['count']:,} held-out problems, greedy, 95 % "
            f"intervals; {base['gpu'] if found['device'] != 'cpu' else 'CPU'}, {base['date']}")


def _on_a_log_axis(found: list[tuple[str, float, float, float]]) -> list[tuple[str, float, float, float]]:
    """Values of 0 stay 0 and are drawn at the edge; interval ends below the edge are cut there."""
    edge = _edge(found)
    return [(name, value, max(low, edge), max(high, edge)) for name, value, low, high in found]


def _edge(found: list[tuple[str, float, float, float]]) -> float:
    """A third of the smallest positive value: the left edge of the logarithmic axis."""
    return min((value for _, value, *_ in found if value > 0), default=1e-6) / 3


def _draw(fig: go.Figure, name: str, value: float, low: float, high: float, case: str) -> None:
    at = value if value > 0 or case != KL else low
    colour = style.BLUE if name == BASELINE else style.INK
    fig.add_scatter(
        x=[at], y=[name], mode="markers",
        marker={"size": 10, "color": colour, "symbol": "circle" if at == value else "triangle-left-open"},
        error_x={"type": "data", "symmetric": False, "array": [max(0.0, high - at)], "arrayminus": [max(0.0, at - low)],
                 "color": colour, "thickness": 1.5},
        hovertemplate=f"{name}: {value:.4g} ({low:.4g} to {high:.4g})<extra></extra>",
    )


def _finding(rows: list[Row], case: str, judged: Collection[str]) -> str:
    """The title: what the figure shows, as a sentence. judged: the variants that change the answers."""
    found = latest(rows, case)
    if case in (EXACT, FAR) and BASELINE in found:
        others = set(found) - {BASELINE, CONTROL}
        return (f"{found[BASELINE]['value']:.1%} right; {len(others & set(judged))} of {len(others)} variants change "
                "the answers")
    if case in (SAME, EXPERTS):
        return f"{sum(r['value'] == 1.0 for r in found.values())} of {len(found)} variants change none"
    if case == KL:
        same = sum(r["value"] == 0.0 for r in found.values())
        return f"{same} of {len(found)} variants leave every probability as it is"
    return f"{len(found)} variants on the same right answers"


def _numbers(by_case: Mapping[str, Mapping[str, Row]], name: str) -> list[str]:
    exact = by_case[EXACT][name]
    found = exact["conditions"]
    paired = ["", ""] if "p" not in found else [
        f"{100 * found['difference']:+.2f} ({100 * found['difference_low']:+.2f} to "
        f"{100 * found['difference_high']:+.2f})", f"{found['p']:.2g}"]
    same, kl, loss, experts = (by_case[case].get(name) for case in (SAME, KL, LOSS, EXPERTS))
    return [
        f"{100 * exact['value']:.2f}", f"{100 * found['low']:.2f} to {100 * found['high']:.2f}", *paired,
        _percent(same), "" if kl is None else f"{kl['value']:.2g}",
        "" if loss is None else f"{loss['conditions']['perplexity']:.4f}", _percent(experts),
    ]


def _percent(row: Row | None) -> str:
    return "" if row is None else f"{100 * row['value']:.2f}"
