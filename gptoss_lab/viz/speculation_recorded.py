"""Recorded rows: drafts on a checkpoint, step times of real shapes with what they predict (suite "speculation"); and
the decode steps of two models (suite "decode"), of which one might draft for the other."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.speculation import StepSeconds, measured_step_seconds, speedup
from gptoss_lab.viz.table import Table, table

NOTHING = "not recorded yet"


def drafts_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per row of `bench speculation` on a checkpoint: what stood, and speed-up counted and predicted."""
    lines = []
    for row in rows:
        of = row["conditions"]
        if row["suite"] != "speculation" or row["value"] is None or "predicted_speedup" not in of:
            continue
        lines.append([of["model"], of["draft"], of["draft_tokens"], of["batch"], f"{of['acceptance']:.2f}",
                      f"{of['tokens_per_round']:.2f}", f"{of['predicted_speedup']:.2f}", f"{of['speedup']:.2f}",
                      row["gpu"] or "CPU", "recorded"])
    columns = ["model", "draft", "k", "batch", "stood, of tested", "tokens a round", "speed-up predicted", "measured",
               "machine", "origin"]
    return _shown(lines, columns)


def steps_table(rows: Iterable[Mapping[str, Any]], acceptances: Iterable[float] = (0.5, 0.7, 0.9)) -> Table:
    """One line per batch and length whose step, check and proposal were measured: the three times, and the speed-up at
    some acceptances. A proposal is that of the other model in the same rows; the last row of its kind counts."""
    acceptances, times = tuple(acceptances), {}
    for row in rows:
        of = row["conditions"]
        if row["suite"] == "speculation" and row["metric"] == "ms_per_step" and row["value"] is not None:
            times[row["case"], of["batch"], of["tokens"], of["experts"]] = (row["value"] / 1e3, of["model"])
    lines = []
    for (case, batch, tokens, form), (check, model) in sorted(times.items(), key=lambda item: item[0][1:]):
        step, proposal = (times.get((name, batch, tokens, form)) for name in ("a step", "a proposal"))
        if not case.startswith("a check of ") or step is None or proposal is None:
            continue
        k = int(case.removeprefix("a check of ")) - 1
        found = StepSeconds(step[0], proposal[0], check)
        lines.append([f"{proposal[1]} for {model}", form, f"{batch} at {tokens:,}", k,
                      *(f"{1e3 * s:.2f}" for s in (step[0], proposal[0], check)),
                      *(f"{speedup(a, k, found):.2f}" for a in acceptances), "recorded"])
    return _shown(lines, ["models", "experts", "batch", "k", "step, ms", "proposal, ms", "check, ms",
                          *(f"speed-up at a = {a}" for a in acceptances), "origin"])


def proposals_table(
    rows: Iterable[Mapping[str, Any]], target: str, draft: str, batches: Iterable[int], tokens: int
) -> Table:
    """One line per form of the experts and batch in which a decode step of both models was recorded, at a context of
    `tokens`: the two steps, and how much of the target's step a proposal costs."""
    rows, batches, lines = list(rows), tuple(batches), []
    for form in ("fp8", "mxfp4"):
        for batch in batches:
            try:
                step, proposal = (measured_step_seconds(rows, name, batch, tokens, experts=form)
                                  for name in (target, draft))
            except CostError:
                continue
            lines.append([form, batch, f"{1e3 * proposal:.2f}", f"{1e3 * step:.2f}", f"{proposal / step:.2f}",
                          "recorded"])
    return _shown(lines, ["experts", "batch", f"step of {draft}, ms", f"step of {target}, ms", "draft / step",
                          "origin"])


def _shown(lines: list[list[Any]], columns: list[str]) -> Table:
    return table(lines or [[NOTHING, *[""] * (len(columns) - 1)]], columns)
