"""Timings of attention: every case of the benchmark with its bound, and "not recorded yet" where there is no row.

What: result rows of the suite "attention" (recorded in data/measured, or live from this machine's GPU) as a table, a
figure against the bound, and the cost of the sink.

How: a row's `peer` was timed in turn with it, in the same run; only that pair says what the sink costs. Rows of
different runs may differ by the clocks alone, so the table gives each run a letter. A kernel without sinks belongs to
the pairs, and `auto` is one of the others timed once more: `with_sinks` leaves both out.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import plotly.graph_objects as go
import torch

from gptoss_lab.bench import attention as bench
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
BARE = " without sinks"
COSTS_SHOWN = 50.0              # per cent, to either side
COLUMNS = ("case", "backend", "bound, us", "time, us", "% of bound", "rate", "spread, %", "run", "origin")
LIVE = (
    (bench.Case("prefill", 4096, 4096), ("gluon", "triton")),
    (bench.Case("decode", 1, 8192, batch=16), ("triton",)),
)
"""What a notebook times on a GPU: kernels of this project, which need no long compilation."""
HOPPER = (9, 0)
LONGEST = 90      # characters of a reason in a table


def cases(form: str) -> list[str]:
    """Names of the benchmark's cases of a form ("prefill", "paged_prefill", "decode"), in its order."""
    return [case.name for case in bench.CASES if case.form == form]


def times(rows: Iterable[Row], case: str) -> list[Row]:
    """The rows in microseconds of a case, the last one of each backend, fastest first, failed ones at the end."""
    last = {row["backend"]: row for row in rows if row["case"] == case and row["metric"] == "microseconds"}
    return sorted(last.values(), key=lambda row: (row["value"] is None, row["value"] or 0.0))


def times_table(rows: Iterable[Row], names: Sequence[str], origin: str = "recorded") -> Table:
    """One line per case and backend: bound first, then the time, then per cent of the bound; absent cases say so.

    names: cases to list, for example `cases("decode")`.
    """
    rows, runs, lines = list(rows), {}, []
    for case in names:
        found = times(rows, case)
        if not found:
            lines.append([case, "not recorded yet", *[""] * (len(COLUMNS) - 2)])
        for row in found:
            run = runs.setdefault((row["command"], row["commit"], row["date"]), ascii_uppercase[len(runs) % 26])
            lines.append([case, row["backend"], *_numbers(row, _rate(rows, row)), run, origin])
    return table(lines, COLUMNS)


def with_sinks(rows: Iterable[Row]) -> list[Row]:
    """The rows of kernels that were named and given sinks: without those of `auto` and of the bare kernels."""
    return [row for row in rows if not row["backend"].endswith(BARE) and not row["backend"].startswith("auto")]


def provenance(rows: Iterable[Row]) -> str:
    """What all these rows share, in a line or two: machine, drivers, precision, repetitions, statistic, dates."""
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        return "no rows"
    first = rows[0]["conditions"]
    machines = sorted({f"{row['gpu'] or 'CPU'}, driver {row['driver']}" for row in rows})
    torches = sorted({f"torch {row['versions'].get('torch')}, triton {row['versions'].get('triton')}" for row in rows})
    statistics, dates = ({row[key] for row in rows} for key in ("statistic", "date"))
    return (f"{'; '.join(machines)}; {'; '.join(torches)}; {first.get('dtype')}, {first.get('heads')} query heads over "
            f"{first.get('kv_heads')} of {first.get('head_dim')}; {_range({row['repetitions'] for row in rows})} "
            f"readings, {', '.join(sorted(statistics))}, L2 {first.get('l2')}; {', '.join(sorted(dates))}")


def sink_costs(rows: Iterable[Row]) -> list[tuple[str, str, float, float, float, float]]:
    """(case, backend, us with, us without, cost in %, larger spread of the two in %), pairs of one run each.

    A pair is a row "<backend> without sinks" whose peer is <backend>: both were timed in turn.
    """
    rows = [row for row in rows if row["metric"] == "microseconds" and row["value"] is not None]
    last = {(row["case"], row["backend"]): row for row in rows}
    pairs = []
    for (case, name), bare in last.items():
        backend = name.removesuffix(BARE)
        if backend == name or bare["peer"] is None or bare["peer"]["name"] != backend:
            continue
        with_sink = bare["peer"]["value"]
        same = [r["spread"] for r in rows if (r["case"], r["backend"], r["value"]) == (case, backend, with_sink)]
        spread = max(s or 0.0 for s in [bare["spread"], *same])
        pairs.append((case, backend, with_sink, bare["value"], 100 * (with_sink / bare["value"] - 1), 100 * spread))
    return pairs


def costs_table(rows: Iterable[Row], origin: str = "recorded", beyond: bool = False) -> Table:
    """`sink_costs` as a table that says whether the difference can be told from the spread of the readings.

    beyond: only the pairs whose difference can.
    """
    lines = [
        [case, backend, f"{with_sink:,.1f}", f"{without:,.1f}", f"{cost:+.2f}", f"{spread:.1f}",
         "yes" if abs(cost) <= spread else "no", origin]
        for case, backend, with_sink, without, cost, spread in sink_costs(rows)
        if not beyond or abs(cost) > spread
    ]
    return table(lines, ["case", "backend", "with sinks, us", "without, us", "sink costs, %", "spread, %",
                         "within the spread", "origin"])


def costs_figure(rows: Iterable[Row], names: Sequence[str], origin: str = "recorded") -> go.Figure:
    """`sink_costs` of the cases `names`: a mark and the spread for each pair, filled where the cost lies beyond it. The
    axis ends where the costs are clear to see; a longer bar says how long it is."""
    pairs = [pair for pair in sink_costs(rows) if pair[0] in names]
    cases = [case for case in names if any(case == pair[0] for pair in pairs)]
    backends = sorted({pair[1] for pair in pairs})
    fig = go.Figure()
    for n, backend in enumerate(backends):
        found = [pair for pair in pairs if pair[1] == backend]
        symbol, colour = ("circle", "square", "diamond", "cross", "triangle-up")[n % 5], style.PALETTE[n % 5]
        fig.add_scatter(
            x=[cost for *_, cost, _ in found],
            y=[_place(cases, pairs, case, backend) for case, *_ in found],
            mode="markers", name=backend, text=[case for case, *_ in found],
            error_x={"type": "data", "array": [spread for *_, spread in found], "thickness": 1, "width": 2},
            marker={"size": 9, "color": colour, "line": {"width": 1.8, "color": colour},
                    "symbol": [symbol if abs(cost) > spread else f"{symbol}-open" for *_, cost, spread in found]},
            hovertemplate="%{text}: %{x:+.1f} %<extra></extra>")
        for case, *_, spread in found:
            if spread > COSTS_SHOWN:
                fig.add_annotation(x=COSTS_SHOWN, y=_place(cases, pairs, case, backend), text=f"± {spread:.0f} % →",
                                   showarrow=False, xanchor="right", yanchor="bottom", font={"color": colour})
    fig.add_vline(x=0, line={"color": style.MUTED, "width": 1, "dash": "dot"})
    fig.update_xaxes(title_text="time with the sink over time without it, % more", range=[-COSTS_SHOWN, COSTS_SHOWN])
    fig.update_yaxes(title_text="case", tickvals=list(range(len(cases))), ticktext=cases,
                     range=[len(cases) - 0.4, -0.6])
    within = sum(abs(cost) <= spread for *_, cost, spread in pairs)
    title = (f"{within} of {len(pairs)} pairs agree within the spread of their readings" if pairs
             else "No pair is recorded")
    return style.finish(fig, title, origin, "bars: the larger spread of the two; filled: the cost lies beyond it",
                        height=240 + 34 * max(1, len(cases)), legend={"y": -0.12})


def bound_figure(rows: Iterable[Row], names: Sequence[str], origin: str = "recorded") -> go.Figure:
    """Per cent of the bound, one line per case, one mark per backend with sinks. Cases without rows are left out."""
    rows = list(rows)
    marks: dict[str, list[tuple[str, float]]] = {}
    for case in names:
        for row in times(rows, case):
            if row["value"] and row["bound"] and not row["backend"].endswith(BARE):
                name = "auto" if row["backend"].startswith("auto") else row["backend"]
                marks.setdefault(name, []).append((case, 100 * row["bound"] / row["value"]))
    marks.pop("auto", None)                                # it is one of the others, timed once more
    fig = go.Figure()
    symbols = [f"{name}-open" for name in ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")]
    for n, (name, points) in enumerate(sorted(marks.items())):
        fig.add_scatter(x=[y for _, y in points], y=[case for case, _ in points], mode="markers", name=name,
                        marker={"size": 13, "symbol": symbols[n % len(symbols)], "line": {"width": 2},
                                "color": style.PALETTE[n % len(style.PALETTE)]})
    shown = [case for case in names if any(case == c for points in marks.values() for c, _ in points)]
    fig.update_xaxes(title_text="% of the datasheet's bound", range=[0, 100])
    fig.update_yaxes(categoryorder="array", categoryarray=shown[::-1], title_text="case")
    best = max((share for points in marks.values() for _, share in points), default=None)
    title = (f"None of {len(names)} cases is recorded yet" if best is None else
             f"{len(shown)} of {len(names)} cases recorded; the best reaches {best:.0f} % of its bound")
    return style.finish(fig, title, origin, "bound: FLOPs / 989 TFLOP/s or bytes / 4.8 TB/s, whichever takes longer",
                        height=260 + 34 * max(1, len(shown)), legend={"y": -0.28 if len(shown) < 8 else -0.16})


def live(repetitions: int = 5) -> tuple[list[Row], str]:
    """Rows of the cases of LIVE measured on this machine's GPU, and a line that says on what, or why there are none.

    Each kernel is checked against the reference before it is timed. On another GPU than an H200 the bound, which is
    the H200's, is left out.
    """
    if not torch.cuda.is_available():
        return [], "torch sees no GPU here: nothing is timed live"
    name = torch.cuda.get_device_name()
    rows: list[Row] = []
    for case, backends in LIVE:
        able = [b for b in backends if b != "gluon" or torch.cuda.get_device_capability() == HOPPER]
        rows += bench.measure(case, able, repetitions, build=False)
    if "H200" not in name:
        rows = [{**row, "bound": None} for row in rows]
    return rows, f"{name}, {repetitions} readings each, median"


def _place(cases: Sequence[str], pairs: Sequence[tuple], case: str, backend: str) -> float:
    """Where a pair stands: at the number of its case, those of the same case a little apart."""
    here = sorted(pair[1] for pair in pairs if pair[0] == case)
    return cases.index(case) + 0.22 * (here.index(backend) - (len(here) - 1) / 2)


def _numbers(row: Row, rate: Row | None) -> list[str]:
    """bound, time, per cent, rate, spread as text."""
    bound = "" if row["bound"] is None else f"{row['bound']:,.1f}"
    if row["value"] is None:
        return [bound, f"failed: {_short(row['conditions']['failed'])}", "", "", ""]
    share = "" if row["bound"] is None else f"{100 * row['bound'] / row['value']:.0f}"
    speed = "" if rate is None else f"{rate['value']:,.0f} {rate['unit']}"
    return [bound, f"{row['value']:,.1f}", share, speed, f"{100 * (row['spread'] or 0):.1f}"]


def _rate(rows: Sequence[Row], row: Row) -> Row | None:
    """The row of the same reading in TFLOP/s or GB/s."""
    same = [r for r in rows if r["metric"] in ("tflops", "gb_per_s") and r["value"] is not None
            and all(r[key] == row[key] for key in ("case", "backend", "command", "commit", "date"))]
    return same[-1] if same else None


def _short(reason: str) -> str:
    """A reason cut between words at `LONGEST` characters; what was cut stands in the row."""
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST].rsplit(' ', 1)[0]} ..."


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
