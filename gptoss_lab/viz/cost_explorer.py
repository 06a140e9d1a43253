"""The explorer: pick a model, a plan, a batch, lengths, formats and a price; see speed, dollars and where time goes.

Two pure functions of the same `Choice`: `figure` draws, `words` says the same as an HTML table. `show` puts controls
over them; a moved control calls both, so that the text changes with the figure. The left panel has one curve per plan
over the batch with the chosen point on it; the right panel takes the chosen pass apart, bound beside model.

Only standard widgets are used (an HTML text and an Output), and figures leave as plotly's own MIME type, so any front
end that draws either shows it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import Any

import ipywidgets
import plotly.graph_objects as go
from IPython.display import display
from plotly.subplots import make_subplots

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.cost.columns import FACTORS
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.estimate import Question, answers
from gptoss_lab.cost.performance import PerformanceModel, calibrate, kernels_alone, published_system
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import WEIGHT_FORMATS, Precision
from gptoss_lab.cost.sweep import BATCHES, EP_PLANS, NODE_PLANS, Candidate, sweep
from gptoss_lab.viz import cost_decode, explore, style

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 128000)
BOUND = "bound"
_CELL = "text-align:left;padding:2px 10px;white-space:nowrap;vertical-align:top"
_NAMES = {"projections_bf16": "projections, bf16", "projections_fp8": "projections, FP8",
          "attention_full": "attention, full", "attention_window": "attention, window", "activations": "norms",
          "link": "sums over ranks", "link_one_shot": "sums, one-shot", "link_gathers": "gathers",
          "projection_launches": "projections, starts", "attention_launches": "attention, starts",
          "expert_launches": "experts, starts", "layers": "per layer", "collectives": "sums, waits",
          "gathers": "gathers, waits", "collectives_by_extra_rank": "waits for further ranks", "passes": "per pass",
          **{f"experts_{form}": "experts, FLOPs" for form in WEIGHT_FORMATS},
          **{f"expert_weights_{form}": "experts, weights" for form in WEIGHT_FORMATS}}


@dataclass(frozen=True)
class Choice:
    """What the controls say. tokens: prompt (prefill) or context (decode). by: name of a calibration, or 'bound'."""

    model: str = "gpt-oss-120b"
    phase: str = "decode"
    plan: Plan = Plan(4, 1, 4)
    batch: int = 32
    tokens: int = 8192
    weights: str = "fp8"
    kv: str = "bf16"
    usd_per_gpu_hour: float = 3.0
    utilisation: float = 1.0
    by: str = "kernels alone"

    @property
    def question(self) -> Question:
        """The same as a question to `gptoss_lab.cost.estimate`; projections in FP8, as they are served and measured,
        unless the experts are bf16."""
        return Question(preset(self.model), self.phase, self.tokens, self.batch, self.plan,
                        Precision(self.weights, "bf16" if self.weights == "bf16" else "fp8", self.kv),
                        self.usd_per_gpu_hour, self.utilisation)


class Explorer:
    """The calibrations of one set of result rows, and what a choice shows under them."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = results.read_rows(results.recorded_folder()) if rows is None else rows
        made = (calibrate(self.rows), kernels_alone(self.rows), published_system())
        self.models: dict[str, PerformanceModel] = {model.name: model for model in made}

    def names(self) -> list[str]:
        """Names of the calibrations that have a model of some phase, and 'bound'."""
        return [name for name, model in self.models.items() if model.passes] + [BOUND]

    def curves(self, choice: Choice) -> list[Candidate]:
        """The candidates of the left panel: the four EP plans and the chosen one, at all batches."""
        plans = EP_PLANS if choice.plan in EP_PLANS else (*EP_PLANS, choice.plan)
        q = choice.question
        return sweep(self.models.get(choice.by), q.config, q.phase, q.tokens, plans,
                     sorted({*BATCHES, choice.batch}), q.usd_per_gpu_hour, q.utilisation, q.precision)

    def breakdown(self, choice: Choice) -> dict[str, tuple[float, float]]:
        """(bound, modelled) seconds by group of kernels, the largest last; by the bound alone both are the same."""
        q = choice.question
        if choice.by == BOUND:
            return {b.part.name.replace("_", " "): (b.seconds, b.seconds)
                    for b in sorted(q.bound.parts, key=lambda b: b.seconds) if b.seconds}
        passes = self.models[choice.by].of(q.phase)
        modelled = passes.breakdown(q.config, q.tokens, q.batch, q.plan, q.precision)
        rows = {}
        for name, seconds in sorted(modelled.items(), key=lambda item: item[1]):
            factor = any(column in FACTORS for column in passes.groups[name])
            value = passes.fit.coefficients[name]
            if seconds:
                rows[_NAMES.get(name, name)] = (seconds / value if factor else 0.0, seconds)
        return rows

    def figure(self, choice: Choice) -> go.Figure:
        """Speed against price with the chosen point, and the chosen pass by part; or the reason why there is none."""
        try:
            candidates, parts = self.curves(choice), self.breakdown(choice)
        except CostError as error:
            return _refused(str(error))
        q = choice.question
        fig = make_subplots(rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.2,
                            subplot_titles=["all plans over the batch", f"one pass of {q.plan}, batch {q.batch}"])
        cost_decode.add_front(fig, candidates, True, 1, 1)
        cost_decode.add_curves(fig, candidates, True, 1, 1)
        chosen = next(c for c in candidates if (c.plan, c.batch) == (q.plan, q.batch))
        _add_chosen(fig, chosen)
        _add_parts(fig, parts)
        unit = "output" if q.phase == "decode" else "input"
        fig.update_annotations(font_size=13)
        fig.update_xaxes(title_text=f"{unit} tokens/s per user", col=1)
        fig.update_yaxes(type="log", title_text=f"$ per million {unit} tokens", tickvals=cost_decode.TICKS,
                         ticktext=[f"{tick:g}" for tick in cost_decode.TICKS], col=1)
        title = (f"{q.config.name} {q.phase}: {chosen.speed:,.0f} tokens/s per user at ${chosen.usd:.3g} per million"
                 if chosen.memory.fits else f"{q.plan} with batch {q.batch} does not fit into memory")
        return style.finish(fig, title, "modelled", f"{choice.by}; {q.tokens:,} tokens, ${q.usd_per_gpu_hour:g} per "
                            f"GPU-hour, {100 * q.utilisation:.0f} % busy", width=980, height=470, margin={"t": 110})

    def words(self, choice: Choice) -> str:
        """Every answer there is to the choice, as an HTML table: seconds, speed, dollars, mark and source."""
        q = choice.question
        try:
            found = answers(q, self.rows, list(self.models.values()))
        except CostError as error:
            return f"<p>{escape(str(error))}</p>"
        lines = []
        for answer in found:
            point = answer.point(q)
            cells = ("", "", "") if point is None else (
                f"{1e3 * answer.seconds:,.2f} ms", f"{point.tokens_per_second_per_user:,.0f}",
                f"${point.usd_per_million_tokens:.4g}")
            lines.append("".join(
                f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in (answer.name, *cells, answer.mark))
                + f"<td style='padding:2px 10px'>{escape(answer.source)}</td>")
        head = "".join(f"<th style='{_CELL}'>{name}</th>" for name in
                       ("", "time", "tokens/s per user", "per million tokens", "mark", "source"))
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return (f"<p><b>{escape(q.config.name)}, {q.phase}, {q.plan}, batch {q.batch}, {q.tokens:,} tokens, "
                f"{q.precision.experts} experts, {q.precision.dense} projections.</b> "
                f"Fullest GPU: {escape(q.memory.reason)}.</p>"
                f"<table style='line-height:1.35'><tr>{head}</tr>{rows}</table>")


def controls(choice: Choice, names: list[str]) -> dict[str, ipywidgets.Widget]:
    """One control per field of `Choice`."""
    def pick(name: str, options: Any, value: Any, kind: type = ipywidgets.SelectionSlider) -> ipywidgets.Widget:
        return kind(options=options, value=value, description=name, continuous_update=False) if (
            kind is ipywidgets.SelectionSlider) else kind(options=options, value=value, description=name)

    lists = ipywidgets.Dropdown
    return {
        "model": pick("model", ["gpt-oss-120b", "gpt-oss-20b"], choice.model, lists),
        "phase": pick("phase", ["prefill", "decode"], choice.phase, lists),
        "by": pick("times of", names, choice.by, lists),
        "plan": pick("EP/DP/TP", [(f"{p.ep}/{p.dp}/{p.tp}", p) for p in NODE_PLANS], choice.plan),
        "batch": pick("batch", BATCHES, choice.batch),
        "tokens": pick("tokens", [(f"{n:,}", n) for n in TOKENS], choice.tokens),
        "weights": pick("weights", ["fp8", "mxfp4", "bf16"], choice.weights, lists),
        "kv": pick("KV", ["bf16", "fp8"], choice.kv, lists),
        "usd_per_gpu_hour": ipywidgets.FloatSlider(value=choice.usd_per_gpu_hour, min=0.5, max=12, step=0.25,
                                                   description="$ per hour", continuous_update=False),
        "utilisation": ipywidgets.FloatSlider(value=choice.utilisation, min=0.05, max=1, step=0.05, description="busy",
                                              continuous_update=False),
    }


def show(explorer: Explorer, choice: Choice, sentence: str) -> dict[str, ipywidgets.Widget]:
    """Show controls, text and figure; returns the controls and, under 'text', the text widget.

    sentence: what the widget shows, for a reader of the stored notebook. ValueError if it is empty.
    """
    if not sentence.strip():
        raise ValueError("show: a sentence is needed for readers without a running kernel")
    moved = controls(choice, explorer.names())
    text, output = ipywidgets.HTML(), ipywidgets.Output()

    def redraw(*_: Any) -> None:
        now = replace(choice, **{name: control.value for name, control in moved.items()})
        text.value = explorer.words(now)
        with output:
            output.clear_output(wait=True)
            display(explorer.figure(now))

    for control in moved.values():
        control.observe(redraw, names="value")
    redraw()
    grid = ipywidgets.GridBox(list(moved.values()), layout={"grid_template_columns": "repeat(3, 320px)"})
    box = ipywidgets.VBox([grid, output, text])
    box.add_class("gptoss-cost-explorer")
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    display({"text/plain": sentence, explore.VIEW: view}, raw=True)
    return {**moved, "text": text}


def _add_chosen(fig: go.Figure, chosen: Candidate) -> None:
    fig.add_scatter(x=[chosen.speed], y=[chosen.usd], mode="markers", name="chosen", row=1, col=1,
                    marker={"symbol": "circle-open", "size": 18, "color": style.INK, "line": {"width": 2.5}},
                    hovertemplate=f"{chosen.plan}, batch {chosen.batch}<br>{1e3 * chosen.point.step_seconds:.2f} ms "
                                  f"per pass<br>{chosen.memory.reason}<extra>chosen</extra>")


def _add_parts(fig: go.Figure, parts: dict[str, tuple[float, float]]) -> None:
    total = sum(modelled for _, modelled in parts.values())
    names = list(parts)
    for label, colour, at, width in (("modelled", style.BLUE, 1, 0.7), ("its bound", "#c7dbee", 0, 0.3)):
        fig.add_bar(width=width, y=names, x=[1e3 * parts[name][at] for name in names], orientation="h", row=1, col=2,
                    name=label, customdata=[100 * parts[name][at] / total for name in names],
                    marker={"color": colour},
                    hovertemplate="%{y}: %{x:.3f} ms, %{customdata:.1f} % of the pass<extra>" + label + "</extra>")
    fig.update_xaxes(title_text="milliseconds", row=1, col=2)
    fig.update_layout(barmode="overlay")


def _refused(reason: str) -> go.Figure:
    fig = go.Figure()
    fig.add_annotation(text=reason, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    return style.finish(fig, "No model answers this", "modelled", "the reason is below", width=980, height=470)
