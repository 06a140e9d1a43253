"""What users see as traffic outgrows a fleet, and which resource gives way first.

Left: quantiles of the first token and of the time per token against the traffic, simulated on a fleet that is not
enlarged. Right: how many times today's traffic each resource carries. The left one explodes where the right one ends.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.cost.fleet import Report
from gptoss_lab.cost.scale import Sized
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
QUANTILES = (("p50", 0.5, "solid"), ("p95", 0.95, "dash"), ("p99", 0.99, "dot"))


def figure(reports: Mapping[float, Report], limits: Mapping[str, float], what: str) -> go.Figure:
    """reports: by multiple of the traffic. limits: of `cost.scale.limits`. what: the scenario in words."""
    fig = make_subplots(rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.25,
                        subplot_titles=["latency of this fleet", "traffic that each resource carries"])
    for field, name, colour in (("first_token", "first token", style.BLUE), ("per_token", "per token", style.OCHRE)):
        for label, quantile, dash in QUANTILES:
            fig.add_scatter(
                x=list(reports), y=[1e3 * r.quantiles(field, (quantile,))[0] for r in reports.values()], row=1, col=1,
                mode="lines+markers", name=f"{name}, {label}", line={"color": colour, "dash": dash}, marker={"size": 5},
                hovertemplate="%{x:g} times the traffic: %{y:,.1f} ms<extra>" + f"{name}, {label}</extra>")
    carried = dict(reversed(limits.items()))
    colours = [style.RED if times < 10 else style.GREY for times in carried.values()]
    fig.add_bar(y=[f"{name}: {times:.1f}" for name, times in carried.items()], x=list(carried.values()),
                orientation="h", row=1, col=2, showlegend=False, marker={"color": colours},
                hovertemplate="%{y} times the traffic<extra></extra>")
    fig.update_xaxes(range=[-0.3, math.log10(1.3 * max(10.0, *carried.values()))], row=1, col=2)
    fig.add_vline(x=10, line={"color": style.INK, "dash": "dash", "width": 1}, row=1, col=2)
    fig.update_annotations(font_size=13)
    fig.update_xaxes(type="log", title_text="times today's traffic", tickvals=[0.5, 1, 2, 5, 10, 20, 50, 100],
                     ticktext=["0.5", "1", "2", "5", "10", "20", "50", "100"])
    fig.update_yaxes(type="log", title_text="milliseconds", tickvals=[10**n for n in range(-1, 7)],
                     ticktext=["0.1", "1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"], row=1, col=1)
    first, factor = next(iter(limits.items()))
    broken = [name for name, carries in limits.items() if carries < 10]
    title = f"{first[0].upper()}{first[1:]} break first, at {factor:.1f} times the traffic" if broken else (
        "Ten times the traffic breaks nothing")
    return style.finish(fig, title, "modelled", what, width=980, height=470, margin={"t": 110}, legend={"y": -0.22})


def sized_table(fleets: Mapping[float, Sized]) -> Table:
    """One line per traffic (requests per second): replicas, plans, how busy, quantiles, dollars."""
    lines = []
    for rate, sized in fleets.items():
        pools, report = sized.pools, sized.report
        first, token = report.quantiles("first_token"), report.quantiles("per_token")
        lines.append([
            f"{rate:g}", *(f"{p.replicas} x {p.plan}" + (f", batch {p.batch}" if p.phase == "decode" else "")
                           for p in (pools.prefill, pools.decode)),
            pools.prefill.gpus + pools.decode.gpus, f"{100 * report.prefill_busy:.0f}",
            f"{100 * report.decode_fill:.0f}",
            " / ".join(f"{1e3 * value:,.0f}" for value in first), " / ".join(f"{1e3 * v:.1f}" for v in token),
            f"{24 * sized.fleet.usd_per_hour:,.0f}", f"{1e3 * pools.usd_per_request:.3f}",
            "yes" if sized.meets else "no", "modelled"])
    return table(lines, ["requests/s", "prefill", "decode", "GPUs", "prefill busy, %", "decode filled, %",
                         "first token p50 / p95 / p99, ms", "per token p50 / p95 / p99, ms", "$ per day",
                         "$ per 1,000 requests", "goals met", "origin"])
