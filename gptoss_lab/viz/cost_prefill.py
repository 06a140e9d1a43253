"""The 32 published prefill rows beside their bound and ours: a figure with its numbers, and a table.

A row of the figure is one published row: on a logarithmic axis of seconds the bound, ours and the published latency,
and to the right the same as numbers. Each number keeps its mark: published (the post), modelled (bound; ours where no
row of the engine exists, drawn hollow), recorded (ours where one does, drawn full), live.

    python -m gptoss_lab.viz.cost_prefill docs/pictures/published_prefill.png
"""
from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab import results
from gptoss_lab.cost.comparison import Compared, compare
from gptoss_lab.cost.equations import engine_rows, plan_of
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

COLUMNS = ("model", "plan", "tokens", "published, s", "bound, s", "ours, s", "ours is", "live, s",
           "published / bound", "published / ours", "published, $/M", "recomputed, $/M", "ours, $/M")

_DOMAINS = ((0.0, 0.25), (0.55, 0.8))                  # of the two panels, in the width of the figure
_RIGHT = {"showarrow": False, "xanchor": "right"}
_NUMBERS = (("bound, s", 0.055), ("ours, s", 0.1), ("post, s", 0.15), ("$/M", 0.2))


def rows_table(compared: Iterable[Compared]) -> Table:
    """All numbers of all rows; "ours is" says measured or by which model."""
    return table([_line(c) for c in compared], COLUMNS)


def figure(compared: Sequence[Compared]) -> go.Figure:
    """Both models side by side, 16 rows each, with the numbers to the right of the marks."""
    names = list(dict.fromkeys(c.row.model for c in compared))
    fig = make_subplots(rows=1, cols=len(names), subplot_titles=names, horizontal_spacing=0.28)
    numbers: list[dict[str, Any]] = []
    for column, name in enumerate(names, start=1):
        own = [c for c in compared if c.row.model == name]
        _add_marks(fig, own, column)
        numbers += _numbers(own, column)
        fig.update_yaxes(tickvals=list(range(len(own))), ticktext=[_name(c) for c in own], range=[len(own) - 0.4, -1.2],
                         showgrid=False, row=1, col=column)
    fig.update_xaxes(type="log", title_text="seconds", tickvals=[0.01, 0.1, 1, 10], ticktext=["0.01", "0.1", "1", "10"],
                     range=[-2.25, 1.55])
    fig.for_each_xaxis(lambda axis: axis.update(domain=_DOMAINS[axis.anchor != "y"]))
    for note, centre in zip([a for a in fig.layout.annotations if a.text in names], _DOMAINS, strict=False):
        note.update(x=sum(centre) / 2, font={"size": 14})
    heads = [{"x": end + offset, "y": 1.0, "xref": "paper", "yref": "paper", "text": title, "yanchor": "top",
              "font": {"size": 11, "color": style.MUTED}, **_RIGHT}
             for _, end in _DOMAINS for title, offset in _NUMBERS]
    fig.update_layout(annotations=[*fig.layout.annotations, *numbers, *heads])
    return style.finish(fig, headline(compared), "published",
                        f"the post's latencies; bound and ours as marked in the legend; batch 1, FP8{_error(compared)}",
                        height=620, width=1180, margin={"t": 110, "b": 90, "r": 20}, legend={"y": -0.12})


def yours(folder: str | Path | None = None) -> tuple[dict[tuple[str, str, int], float], str]:
    """The user's own prefill rows of batch 1, as `compare(live=...)` takes them, and a line that says whose they are.

    folder: of result rows; by default `results/` of this checkout, where the benchmarks write.
    """
    found = results.recorded_folder().parents[1] / "results" if folder is None else Path(folder)
    rows: list[Mapping[str, Any]] = engine_rows(results.read_rows(found), "prefill") if found.is_dir() else []
    live = {(row["conditions"]["model"], str(plan_of(row["conditions"])), row["conditions"]["tokens"]): row["value"]
            for row in rows if row["conditions"]["batch"] == 1}
    if not live:
        return {}, "no prefill row of your own in results/: the column 'live' is empty"
    machines = sorted({f"{row['gpu'] or 'CPU'}, {row['backend']}, {row['date']}" for row in rows})
    return live, f"{len(live)} prefill rows of your own: {'; '.join(machines)}"


def headline(compared: Sequence[Compared]) -> str:
    """How far the published latencies are from the bound, and from ours."""
    over = [c.published_over_bound for c in compared]
    ours = [c.published_over_ours for c in compared if c.published_over_ours is not None]
    agree = sum(c.row.agrees for c in compared)
    text = (f"{agree} of {len(compared)} published costs follow from their latencies; these are {min(over):.0f} to "
            f"{max(over):.0f} times the bound")
    kinds = {c.ours.name for c in compared if c.ours.seconds is not None}
    whose = "ours" if kinds == {"measured"} else f"ours ({'in part ' if 'measured' in kinds else ''}modelled)"
    return text + (f", {min(ours):.1f} to {max(ours):.1f} times {whose}" if ours else "")


def _add_marks(fig: go.Figure, own: Sequence[Compared], column: int) -> None:
    at = list(range(len(own)))
    fig.add_scatter(x=[x for c in own for x in (c.bound_s, c.row.latency_s, None)],
                    y=[y for n in at for y in (n, n, None)], mode="lines", line={"color": style.GRID, "width": 4},
                    hoverinfo="skip", showlegend=False, row=1, col=column)
    measured = [c.ours.name == "measured" for c in own]
    series = [
        ("bound (modelled)", [c.bound_s for c in own], "line-ns-open", style.MUTED),
        (f"ours ({_ours_is(own)})", [c.ours.seconds for c in own],
         ["circle" if m else "circle-open" for m in measured], style.GREEN),
        ("published", [c.row.latency_s for c in own], "diamond", style.BLUE),
    ]
    for name, values, symbol, colour in series:
        fig.add_scatter(x=values, y=at, mode="markers", name=name, legendgroup=name, showlegend=column == 1,
                        marker={"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2, "color": colour}},
                        hovertemplate="%{x:.4g} s<extra>" + name + "</extra>", row=1, col=column)


def _numbers(own: Sequence[Compared], column: int) -> list[dict[str, Any]]:
    """The numbers of a panel as annotations beside it."""
    side, axis, made = _DOMAINS[column - 1][1], "y" if column == 1 else f"y{column}", []
    for n, c in enumerate(own):
        texts = (_seconds(c.bound_s), _seconds(c.ours.seconds), _seconds(c.row.latency_s),
                 f"{c.row.usd_per_million_input_tokens:.3f}")
        made += [{"x": side + offset, "y": n, "xref": "paper", "yref": axis, "text": text, "font": {"size": 11},
                  **_RIGHT} for text, (_, offset) in zip(texts, _NUMBERS, strict=True)]
    return made


def _ours_is(own: Sequence[Compared]) -> str:
    kinds = list(dict.fromkeys(c.ours.name for c in own))
    return ", ".join("measured: full marks" if k == "measured" else f"modelled: {k}" for k in kinds)


def _error(compared: Sequence[Compared]) -> str:
    """How far off the model of the hollow marks was where it was checked, and where it was not; or nothing."""
    hollow = [c for c in compared if c.ours.name != "measured" and c.ours.seconds is not None]
    several = {c.row.plan.world for c in hollow} - {1} and all(c.row.plan.world == 1 for c in compared
                                                               if c.ours.name == "measured")
    where = "hollow marks: no pass on several GPUs was measured; on one," if several else "hollow marks:"
    return "".join(f"<br>{where} {source.split('; ')[-1].split(' (')[0]}" for source in
                   sorted({c.ours.source for c in hollow}) if "held-out" in source)


def _name(c: Compared) -> str:
    return f"EP{c.row.plan.ep}, {c.row.input_tokens:,}"


def _seconds(value: float | None) -> str:
    return "missing" if value is None else f"{value:.3f}"


def _line(c: Compared) -> list[object]:
    ours = "missing" if c.ours.seconds is None else (
        f"measured ({c.ours.source})" if c.ours.name == "measured" else f"modelled: {c.ours.name}")
    ratio = "" if c.published_over_ours is None else f"{c.published_over_ours:.1f}"
    usd = c.usd(c.ours.seconds)
    return [
        c.row.model.removeprefix("gpt-oss-"), str(c.row.plan), c.row.input_tokens, _seconds(c.row.latency_s),
        f"{c.bound_s:.4f}", _seconds(c.ours.seconds), ours, "" if c.live_s is None else _seconds(c.live_s),
        f"{c.published_over_bound:.1f}", ratio, f"{c.row.usd_per_million_input_tokens:.3f}",
        f"{c.usd(c.row.latency_s):.4f}", "" if usd is None else f"{usd:.4f}",
    ]


def main() -> None:
    """Draw the figure from the recorded rows into a file; needs Chromium."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the picture to write (.png)")
    figure(compare(results.read_rows(results.recorded_folder()))).write_image(parser.parse_args().path)


if __name__ == "__main__":
    main()
