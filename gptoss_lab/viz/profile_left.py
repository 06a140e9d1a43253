"""What is left and why: every launch of a step with its bound, what was recorded, and what stands between the two.

The reasons are written by hand, from reading the kernels and from `docs/tried.md`; they are reasons to test, not
results. Where no row exists the table says so, and nothing is put in its place.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from gptoss_lab.cost.equations import plan_of
from gptoss_lab.viz.profile_kernels import Launch
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
REASONS = {
    "QKV product": "promotion to fp32 every 128 columns; 27 column tiles of 192 where 20 of 256 would do",
    "output product, residual included": "promotion to fp32 every 128 columns; the last of 8 rounds is a quarter full",
    "gate/up product": "promotion to fp32 every 128 columns; padding of each expert's rows to 128",
    "down product": "at the ridge: bytes and arithmetic take as long; padding as before",
    "attention, full": "with heads of 64 an exponential costs as much as its two products",
    "attention, window": "tiles of 8 queries fetch some 140 keys each, from L2; exponentials as before",
    "decode_kernel": "one wave of at most 528 programs; a short sequence is over before the memory is at speed",
    "_choose_one_kernel": "one program of one warp a token, and its own launch",
    "decode_gemm": "items of 128 or 256 weight rows dealt to 132 SMs",
    "few_experts": "logits, choice and first weights wait for one another, and a launch of each part",
    "first norm and quantise, before QKV": "so short that a plain copy is behind too; a row's sum comes before its "
                                           "stores",
    "norm and quantise, before the experts": "as before QKV",
    "place the rows' scales": "a launch; four bytes at a time, from wherever a row's token lies",
    "combine, residual included": "four rows gathered for each token",
    "combine, residual and next norm included": "four rows gathered for each token; the norm waits for the whole row",
    "choose experts": "128 programs, one for each 64 tokens, and the row is read twice for its norm",
    "scan the counts": "a launch of few bytes",
    "place rows": "a launch; up to 8,192 tokens every program sums all counts",
    "rope and cache, full": "keys and values are written twice, for attention and for later",
    "rope and cache, sliding": "as in full layers; only the window is kept",
    "rope to pages, full": "a launch of few bytes",
    "rope to pages, sliding": "a launch of few bytes",
    "lengths and page tables to the plans": "launches of few bytes",
    "merge the splits": "a launch, about as long as its work",
    "QKV, norm included": "320 CTAs on 132 SMs: some own half as much again of the weight as others; then the tokens",
    "output, residual included": "180 CTAs on 132 SMs: some own twice as much of the weight as others",
    "router logits and quantised rows": "a launch of few bytes",
    "choose and place": "one program on one SM, in the way of all others",
    "head": "all of the vocabulary is read for one row of each sequence",
}


def left_table(launches: Sequence[Launch], rows: Iterable[Row]) -> Table:
    """Launches by the least time they take in a step, longest first; then all of them together."""
    rows, lines, total, known = list(rows), [], 0.0, 0.0
    for launch in sorted(launches, key=lambda one: -one.times * one.bound_us):
        bound, row = launch.times * launch.bound_us / 1e3, launch.measured(rows)
        total += bound
        time = None if row is None else launch.times * row["value"] / 1e3
        known += 0.0 if time is None else bound
        lines.append([launch.what, launch.times, f"{bound:.3f}", "no row yet" if time is None else f"{time:.3f}",
                      "" if time is None else f"{100 * bound / time:.0f}", _reason(launch)])
    lines.append(["all launches", sum(one.times for one in launches), f"{total:.3f}",
                  f"rows for {100 * known / total:.0f} % of the bound", "", "gaps between launches come on top"])
    return table(lines, ["launch", "times", "bound, ms (modelled)", "recorded, ms", "% of bound",
                         "what stands between"])


def _reason(launch: Launch) -> str:
    return REASONS.get(launch.kernel, REASONS.get(launch.what, ""))


def steps_table(rows: Iterable[Row], wanted: Sequence[tuple[str, str, int, int]]) -> Table:
    """Whole steps of one GPU: wanted is (suite, model, tokens, batch); the last row of the fast forward for each form,
    or none."""
    rows, lines = [row for row in rows if row["backend"].startswith("fast")], []
    for suite, model, tokens, batch in wanted:
        key = {"model": model, "tokens": tokens, "batch": batch}
        found = {row["backend"]: row for row in rows if row["suite"] == suite and row["metric"] in (
            "seconds", "ms_per_step") and plan_of(row["conditions"]).world == 1 and all(
            row["conditions"].get(name) == value for name, value in key.items())}
        name = [suite, model, tokens, batch]
        if not found:
            lines.append([*name, "", "", "no row yet", "", ""])
        for backend, row in found.items():
            value, bound = row["value"], row["bound"]
            scale = 1e3 if row["metric"] == "seconds" else 1.0
            idle = row["conditions"].get("no_kernel_share")
            lines.append([
                *name, backend, f"{scale * bound:.2f}",
                f"failed: {row['conditions']['failed']}" if value is None else f"{scale * value:.2f}",
                "" if value is None else f"{100 * bound / value:.0f}", "" if idle is None else f"{100 * idle:.1f}"])
    return table(lines, ["step", "model", "tokens", "batch", "form", "bound, ms (modelled)", "recorded, ms",
                         "% of bound", "nothing runs, %"])


def kinds_recorded(rows: Iterable[Row], model: str, phase: str, batch: int = 1) -> Table:
    """The last recorded profile of a phase at a batch by kind; one line that says so where there is none."""
    found = {row["case"]: row for row in rows if row["suite"] == "profile" and row["case"].startswith(f"{phase}: ")
             and row["conditions"].get("model") == model and row["conditions"].get("batch", 1) == batch
             and row["value"] is not None}
    lines = [[case.removeprefix(f"{phase}: "), row["conditions"]["launches"], f"{row['value']:,.0f}",
              f"{100 * row['conditions']['share']:.1f}", row["backend"], "recorded"] for case, row in found.items()]
    return table(lines or [["no row yet", "", "", "", "", ""]],
                 ["kind", "launches", "us", "share, %", "form", "origin"])


def shapes_recorded(rows: Iterable[Row], model: str, phase: str, batch: int = 1, most: int = 12) -> Table:
    """The launches of the last recorded profile of a phase, by name, grid and block, those of most time first."""
    found = {row["case"]: row["conditions"]["shapes"] for row in rows
             if row["suite"] == "profile" and row["case"].startswith(f"{phase}: ") and row["value"] is not None
             and row["conditions"].get("model") == model and row["conditions"].get("batch", 1) == batch
             and "shapes" in row["conditions"]}
    shapes = sorted((one for shapes in found.values() for one in shapes), key=lambda one: -one["microseconds"])
    lines = [[_name(one["name"]), " x ".join(map(str, one["grid"])), prod(one["block"]) if one["block"] else "",
              one["launches"], f"{one['microseconds']:,.0f}", f"{one['microseconds'] / one['launches']:,.1f}",
              "recorded"] for one in shapes[:most]]
    return table(lines or [["no row yet", *[""] * 6]],
                 ["launch", "grid", "block", "launches", "us", "us each", "origin"])


def _name(kernel: str) -> str:
    """A kernel's name without namespace, arguments and template."""
    return kernel.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "").split(
        "(")[0].split("<")[0]
