"""How well a calibration explains its measurements: efficiency curves of the kernels, and errors of whole passes.

A kernel's efficiency is its bound over its time. It rises with size, because a launch costs the same for little work;
the fitted line and the measured marks of one kind of kernel show whether one factor and one latency are enough.
"""
from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.cost.columns import FACTORS
from gptoss_lab.cost.fit import Equation
from gptoss_lab.cost.performance import PHASES, PassModel, PerformanceModel
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

KINDS = {"attention_full": ("attention, full", style.BLUE), "attention_window": ("attention, window", style.TEAL),
         "experts_fp8": ("experts, FP8", style.RED), "experts_mxfp4": ("experts, MXFP4", style.PURPLE),
         "link": ("sum over 2 GPUs", style.OCHRE), "link_gathers": ("NCCL's all-reduce, 2 GPUs", style.GREY)}


def efficiency(model: PerformanceModel, phase: str) -> dict[str, list[tuple[str, float, float, float, str]]]:
    """By kind of kernel: (label, bound in seconds, measured share of the bound, fitted share, origin), by size."""
    passes = model.of(phase)
    found: dict[str, list[tuple[str, float, float, float, str]]] = {}
    for line in passes.equations:
        kind = _kind(line)
        if kind:
            bound = max(line.amounts.get(name, 0.0) for name in FACTORS)
            found.setdefault(kind, []).append(
                (line.label, bound, bound / line.seconds, bound / passes.fit.seconds(line.amounts), line.origin))
    return {kind: sorted(points, key=lambda p: p[1]) for kind, points in found.items()}


def efficiency_figure(model: PerformanceModel) -> go.Figure:
    """Prefill and decode side by side: marks are timings (full: recorded; hollow: noted without readings), lines the
    fit."""
    fig = make_subplots(rows=1, cols=2, subplot_titles=["prefill kernels", "decode kernels"], horizontal_spacing=0.1)
    shown: set[str] = set()
    for column, phase in enumerate(("prefill", "decode"), start=1):
        for kind, points in efficiency(model, phase).items():
            name, colour = KINDS[kind]
            x = [1e6 * bound for _, bound, *_ in points]
            fig.add_scatter(x=x, y=[100 * p[3] for p in points], line={"color": colour, "width": 1.4}, row=1,
                            col=column, mode="markers" if kind.startswith("experts") else "lines", hoverinfo="skip",
                            showlegend=False, marker={"symbol": "line-ew-open", "size": 14, "color": colour})
            fig.add_scatter(x=x, y=[100 * p[2] for p in points], mode="markers", name=name, legendgroup=kind,
                            showlegend=kind not in shown, text=[p[0] for p in points], row=1, col=column,
                            marker={"color": colour, "size": 8, "line": {"width": 2, "color": colour},
                                    "symbol": ["circle" if p[4] == "recorded" else "circle-open" for p in points]},
                            hovertemplate="%{text}<br>bound %{x:.3g} us, %{y:.0f} %<extra></extra>")
            shown.add(kind)
    fig.update_annotations(font_size=13)
    fig.update_xaxes(type="log", title_text="bound of one launch, microseconds", dtick=1)
    fig.update_yaxes(title_text="% of the bound reached", range=[0, 105], col=1)
    fig.update_yaxes(range=[0, 105], title_text="%", col=2)
    return style.finish(fig, "Small launches pay for their start; large ones come near one factor of the bound",
                        "modelled", "lines, dashes: the fit; full marks: recorded; hollow: noted, readings not kept",
                        height=430, width=980, margin={"t": 110})


def errors_figure(model: PerformanceModel, phase: str) -> go.Figure:
    """Predicted over measured for every whole pass (kernels timed alone are left out); the held-out ones are full
    marks."""
    passes = model.of(phase)
    fig = go.Figure()
    for held, name, symbol, colour in ((False, "seen by the fit", "circle-open", style.GREY),
                                       (True, "held out", "circle", style.RED)):
        lines = [line for line in passes.equations if line.held_out == held and line.amounts.get("passes", 1)]
        fig.add_scatter(
            x=[line.seconds for line in lines],
            y=[100 * (passes.fit.seconds(line.amounts) / line.seconds - 1) for line in lines], name=name,
            mode="markers", text=[line.label for line in lines], marker={"symbol": symbol, "color": colour, "size": 9},
            hovertemplate="%{text}<br>%{x:.3g} s, predicted %{y:+.1f} %<extra></extra>")
    fig.add_hline(y=0, line={"color": style.MUTED, "width": 1})
    ticks = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)]
    fig.update_xaxes(type="log", title_text="seconds, as measured or published", tickvals=ticks,
                     ticktext=[f"{tick:g}" for tick in ticks])
    fig.update_yaxes(title_text="prediction off by, %")
    return style.finish(fig, passes.error_sentence().split(" (")[0], "modelled", f"{model.name}; {model.basis}")


def coefficients_table(models: Iterable[PerformanceModel]) -> Table:
    """A line per coefficient, a column per calibration and phase: factors over the datasheet, latencies in
    microseconds, and in brackets how many measurements touch it. What none touches, nowhere, has no line."""
    models = list(models)
    passes = {f"{m.name}, {phase}": m.passes.get(phase) for m in models for phase in PHASES}
    names = dict.fromkeys(name for p in passes.values() if p for name in p.fit.coefficients)
    lines = [[name, *(_coefficient(p, name) for p in passes.values()), "modelled"] for name in names
             if any(p and p.fit.lines.get(name) for p in passes.values())]
    why = [m.missing.get(phase, "") for m in models for phase in PHASES]
    if any(why):
        lines.append(["none, because", *why, "missing"])
    return table(lines, ["coefficient", *passes, "origin"])


def _coefficient(passes: PassModel | None, name: str) -> str:
    if passes is None or name not in passes.fit.coefficients:
        return ""
    if not (seen := passes.fit.lines[name]):
        return "not measured"
    value = passes.fit.coefficients[name]
    factor = any(column in FACTORS for column in passes.groups[name])
    return (f"{value:.2f} x bound" if factor else f"{1e6 * value:.1f} us") + f" ({seen})"


def _kind(line: Equation) -> str | None:
    starts = ("attention_launches", "expert_launches", "collectives", "gathers")
    return next((kind for kind in KINDS if line.amounts.get(kind) and any(line.amounts.get(n) for n in starts)
                 and not line.amounts.get("passes")), None)
