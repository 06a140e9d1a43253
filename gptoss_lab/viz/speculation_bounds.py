"""Speculation at the bounds: bytes of draft, step and verification; the gain by acceptance and length; what would pay.

All of it is arithmetic of `cost.speculation`, for one H200 and one format of the weights. `shared` asks for the best
that routing could do: proposals that use only experts which their first token reads anyway.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import RELEASED, SERVED, Precision, decode_bound, verify_bound
from gptoss_lab.cost.bounds import Bound
from gptoss_lab.cost.speculation import StepSeconds, bound_steps, draft_bytes_that_pay, speedup
from gptoss_lab.viz import style
from gptoss_lab.viz.speculation_heads import head_bytes
from gptoss_lab.viz.table import Table, table

CONTEXT = 8192
FORMS = {"FP8": SERVED, "packed MXFP4": RELEASED}
LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """Who drafts for whom: a batch, a form of the weights (a key of FORMS), and whether proposals share experts."""

    target: ModelConfig
    draft: ModelConfig
    batch: int = 1
    form: str = "FP8"
    shared: bool = False

    @property
    def precision(self) -> Precision:
        """Of both models."""
        return FORMS[self.form]

    def steps(self, draft_tokens: int) -> StepSeconds:
        """The three times at their bounds."""
        steps = bound_steps(self.target, self.draft, CONTEXT, draft_tokens, self.batch, self.precision)
        return steps.with_shared_experts() if self.shared else steps

    def __str__(self) -> str:
        return f"{self.target.name}, {self.form}, batch {self.batch} at {CONTEXT:,} tokens, one H200 at its datasheet"


def step_bytes(limit: Bound) -> float:
    """Weight and cache bytes of a pass."""
    return sum(part.part.memory_bytes for part in limit.parts)


def bytes_table(target: ModelConfig, draft: ModelConfig, batches: Iterable[int], draft_tokens: int = 4) -> Table:
    """One line per form and batch: GB that a draft step, a step and a verification read, as multiples of the step."""
    lines = []
    for form, precision in FORMS.items():
        for batch in batches:
            step = step_bytes(decode_bound(target, CONTEXT, batch, precision))
            drafted = step_bytes(decode_bound(draft, CONTEXT, batch, precision))
            checked = step_bytes(verify_bound(target, CONTEXT, draft_tokens, batch, precision))
            lines.append([form, batch, *(f"{size / 1e9:.1f}" for size in (drafted, step, checked)),
                          f"{drafted / step:.2f}", f"{checked / step:.2f}", "modelled"])
    return table(lines, ["weights", "batch", "draft step, GB", "step, GB", f"check of {draft_tokens + 1}, GB",
                         "draft / step", "check / step", "origin"])


def gain_figure(case: Case, acceptance: float = 0.7, draft_tokens: int = 4) -> go.Figure:
    """Speed-up against acceptance, one curve for each length; the chosen point marked."""
    fig, shares = go.Figure(), [n / 50 for n in range(51)]
    for colour, k in zip(style.PALETTE, LENGTHS, strict=False):
        fig.add_scatter(x=shares, y=[speedup(a, k, case.steps(k)) for a in shares], mode="lines", name=f"k = {k}",
                        line={"color": colour, "width": 4 if k == draft_tokens else 1.5})
    gain = speedup(acceptance, draft_tokens, case.steps(draft_tokens))
    fig.add_hline(y=1, line={"color": style.INK, "width": 1, "dash": "dot"}, annotation_text="as fast as without",
                  annotation_position="top left")
    fig.add_scatter(x=[acceptance], y=[gain], mode="markers", showlegend=False,
                    marker={"color": style.RED, "size": 12, "symbol": "diamond"})
    fig.update_xaxes(title_text="share of tested proposals that stand, a", range=[0, 1.01])
    fig.update_yaxes(title_text="speed-up", rangemode="tozero")
    drafts = "shared experts" if case.shared else "every token's own experts"
    title = f"{case.draft.name} proposes {draft_tokens} at a = {acceptance:.2f}: {gain:.2f} times the speed"
    return style.finish(fig, title, "modelled", f"{case}; {drafts}", height=440, legend={"y": -0.2})


def paying_figure(case: Case, lengths: Iterable[int] = (1, 2, 4)) -> go.Figure:
    """Bytes that a step of the draft may read without losing, against acceptance; what real drafts read."""
    fig, shares = go.Figure(), [n / 50 for n in range(51)]
    for colour, k in zip(style.PALETTE, lengths, strict=False):
        steps = case.steps(k)
        allowed = [max(0.0, draft_bytes_that_pay(a, k, steps.target, steps.verify)) / 1e9 for a in shares]
        fig.add_scatter(x=shares, y=allowed, mode="lines", name=f"k = {k}: at most", line={"color": colour})
    needs = {case.draft.name: step_bytes(decode_bound(case.draft, CONTEXT, case.batch, case.precision)),
             "a prediction head with the unembedding": head_bytes(case.target)}
    for name, size in needs.items():
        fig.add_hline(y=size / 1e9, line={"color": style.INK, "dash": "dot", "width": 1},
                      annotation_text=f"{name}: {size / 1e9:.1f} GB", annotation_position="top left")
    fig.update_xaxes(title_text="share of tested proposals that stand, a", range=[0, 1.01])
    fig.update_yaxes(title_text="GB a proposal may cost", rangemode="tozero")
    one = case.steps(1)
    at = draft_bytes_that_pay(0.7, 1, one.target, one.verify) / 1e9
    title = f"With 7 of 10 standing and k = 1, a proposal may cost {at:.1f} GB at batch {case.batch}"
    return style.finish(fig, title, "modelled", str(case), height=440, legend={"y": -0.2})
