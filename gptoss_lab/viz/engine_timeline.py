"""The scheduler's record as a picture: one row for each sequence, one column for each step, pages below.

Colours say what a sequence did (`gptoss_lab.engine.timeline` defines the kinds), numbers how many tokens it read. The
example runs a model over a page pool that is too small for all that arrives, so that everything the scheduler can do
happens within some thirty steps: chunks of a long prompt beside decode, waiting, a preemption, a cancel.
"""
from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gptoss_lab.engine import Engine, Loop, SamplingParams, Timeline
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.memory import pool_for
from gptoss_lab.engine.timeline import KINDS, Entry
from gptoss_lab.model import Transformer
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

COLOURS = dict(zip(KINDS, (style.GRID, style.BLUE, style.GREEN, style.OCHRE, style.RED, style.INK), strict=True))

ARRIVALS = ((0, 40, 14), (0, 9, 24), (2, 70, 6), (4, 5, 12), (9, 21, 10), (12, 3, 8))
"""(step of arrival, tokens of the prompt, new tokens) of the example's sequences."""
CANCELLED = {4: 15}
"""Sequence -> step before which its client goes away."""


def example(model: Transformer, pages: int = 15, page_size: int = 8, step_tokens: int = 16) -> Timeline:
    """Run the arrivals above, greedy, over a pool of so many pages, at most step_tokens tokens a step.

    PromptError if the pool cannot hold the largest sequence (75 positions).
    """
    pool = pool_for(model, pages * page_size, sequences=4, page_size=page_size)
    timeline = Timeline()
    loop = Loop(Engine(model, PlainDecoder(model, step_tokens, pool)), max_batch=4, timeline=timeline)
    step, last = 0, max(when for when, _, _ in ARRIVALS)
    while step <= last or not loop.idle:
        for sequence, (when, length, new) in enumerate(ARRIVALS):
            if when == step:
                prompt = [(31 * sequence + 7 * n) % model.config.vocab_size for n in range(length)]
                loop.submit(sequence, prompt, SamplingParams(temperature=0, max_new_tokens=new, stop_ids=()))
        for sequence in (s for s, when in CANCELLED.items() if when == step):
            loop.cancel(sequence)
        loop.step()
        step += 1
    return timeline


def figure(timeline: Timeline, step: int | None = None, what: str = "greedy decoding over a small page pool"
           ) -> go.Figure:
    """The whole record; with a step, everything after it is left out. ValueError for a step that was not recorded."""
    last = len(timeline.steps) - 1 if step is None else step
    if not 0 <= last < len(timeline.steps):
        raise ValueError(f"step is {last}; 0 to {len(timeline.steps) - 1} were recorded")
    sequences, steps = timeline.sequences, timeline.steps[: last + 1]
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.06)
    lanes = [timeline.of(sequence)[: last + 1] for sequence in sequences]
    fig.add_heatmap(
        z=[[None if e is None else KINDS.index(e.kind) for e in lane] for lane in lanes],
        text=[[_label(e) for e in lane] for lane in lanes], customdata=[[_sentence(e) for e in lane] for lane in lanes],
        x=list(range(len(steps))), y=[f"sequence {s}" for s in sequences], texttemplate="%{text}", xgap=1, ygap=3,
        colorscale=_steps(), zmin=-0.5, zmax=len(KINDS) - 0.5, showscale=False, hoverongaps=False,
        textfont={"size": 10}, hovertemplate="step %{x}, %{y}: %{customdata}<extra></extra>", row=1, col=1,
    )
    fig.add_scatter(x=list(range(len(steps))), y=[s.pages_held for s in steps], mode="lines", showlegend=False,
                    line={"shape": "hvh", "color": style.PURPLE}, fill="tozeroy", row=2, col=1,
                    hovertemplate="step %{x}: %{y} pages held<extra></extra>")
    fig.add_hline(y=steps[-1].pages, line={"dash": "dot", "color": style.MUTED}, row=2, col=1)
    for kind in KINDS:
        fig.add_scatter(x=[None], y=[None], mode="markers", name=kind, row=1, col=1,
                        marker={"symbol": "square", "size": 11, "color": COLOURS[kind]})
    ends = [-0.5, len(timeline.steps) - 0.5]
    fig.update_xaxes(showgrid=False, range=ends)
    fig.update_xaxes(title_text="step", row=2, col=1)
    fig.update_yaxes(showgrid=False, autorange="reversed", row=1, col=1)
    fig.update_yaxes(title_text="pages", range=[0, 1.15 * max(1, steps[-1].pages)], row=2, col=1)
    read, found = (sum(getattr(s, name) for s in steps) for name in ("read", "found"))
    return style.finish(
        fig, f"{len(steps)} steps read {read} tokens and found {found}; at most "
             f"{max(s.pages_held for s in steps)} of {steps[-1].pages} pages were held",
        "live", what, height=230 + 44 * len(sequences), legend={"y": -0.2},
    )


def moment(timeline: Timeline, step: int) -> Table:
    """What every sequence did in one step."""
    rows = [[e.sequence, e.kind, e.read, e.found, e.finish or ""] for e in timeline.steps[step].entries]
    return table(sorted(rows), ["sequence", "in this step", "tokens read", "tokens found", "ended"])


def totals(timeline: Timeline) -> Table:
    """For every sequence: the steps it waited, the tokens it read and found, how often it made room."""
    rows = []
    for sequence in timeline.sequences:
        entries = [e for e in timeline.of(sequence) if e is not None]
        count = {kind: sum(e.kind == kind for e in entries) for kind in KINDS}
        rows.append([sequence, count["waiting"], sum(e.read for e in entries), sum(e.found for e in entries),
                     count["preempted"], "cancelled" if count["cancelled"] else entries[-1].finish or "goes on"])
    return table(rows, ["sequence", "steps waited", "tokens read", "tokens found", "made room", "ended"])


def _label(entry: Entry | None) -> str:
    return str(entry.read) if entry is not None and entry.read > 1 else ""


def _sentence(entry: Entry | None) -> str:
    if entry is None:
        return ""
    done = f", read {entry.read}, found {entry.found}" if entry.read or entry.found else ""
    return entry.kind + done + (f", ended: {entry.finish}" if entry.finish else "")


def _steps() -> list[list[float | str]]:
    """A colour scale of flat steps, one for each kind."""
    n = len(KINDS)
    return [[at / n, COLOURS[kind]] for i, kind in enumerate(KINDS) for at in (i, i + 1)]
