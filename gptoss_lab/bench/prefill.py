"""How long a prompt takes, from token ids to the logits of its last token: the whole model, nothing left out.

Lengths of the published table at batch 1, and 8192 tokens at batches 2, 4 and 8, since the post found batch 1 best.
Every reading is wall time of one call on idle caches, embedding, all layers, cache writes, norm and head included; the
median is reported, with all readings. Cases come in the order of their worth, and a time budget ends the list early.

    gptoss-lab bench prefill --model gpt-oss-120b --experts fp8 --projections fp8
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench.fast_check import prepared
from gptoss_lab.bench.fast_model import (
    Budget,
    Row,
    Rows,
    Subject,
    expert_use,
    give_back,
    random_ids,
    synchronise,
)
from gptoss_lab.bench.timing import clocks
from gptoss_lab.bench.trace import idle_share, record
from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import prefill_bound
from gptoss_lab.cost.published import SOURCE, read_published
from gptoss_lab.model.fast import FastTransformer, FastWeights, make_pool
from gptoss_lab.results import make_row

CASE = "prefill"
HEADER = (f"{'case':24} {'bound':>9} {'measured':>9} {'of bound':>8} {'tokens/s':>9} {'published':>9} {'faster':>7}"
          "  spread")


@dataclass(frozen=True)
class Prompt:
    """batch prompts of `tokens` tokens each."""

    tokens: int
    batch: int = 1

    @property
    def name(self) -> str:
        """For example "8192 tokens x 4"."""
        return f"{self.tokens} tokens x {self.batch}"


CASES = (Prompt(8192), Prompt(32768), Prompt(65536), Prompt(128000), Prompt(8192, 8), Prompt(8192, 4), Prompt(8192, 2))


def run(
    subject: Subject, out: Path | None = None, cases: Sequence[Prompt] = CASES, *, repetitions: int = 5,
    seconds: float | None = None, checked: bool = True, weights: FastWeights | None = None,
) -> list[Row]:
    """Lay the weights out, check them, time the cases; print the table and write each row as it is measured.

    out: a .jsonl file; cases that it holds are left out. seconds: a case is begun only while it should end within them.
    weights: laid out already. WrongResult before anything is timed if the check fails.
    """
    budget, rows = Budget(seconds), Rows(out)
    left = [case for case in cases if not rows.has("prefill", CASE, subject, batch=case.batch, tokens=case.tokens)]
    if not left:
        return rows.all
    weights = prepared(subject, rows, weights, checked)
    print(f"{subject.config.name}, {subject.backend}\n{HEADER}", flush=True)
    rate = 0.0                                                           # measured over bound, of the last case
    for case in left:
        expected = rate * bound_seconds(subject, case) * (repetitions + 2)
        if expected > budget.left():
            print(f"{case.name:24} left out: {expected:.0f} s are expected and {budget.left():.0f} s left", flush=True)
            continue
        new = measure(subject, weights, case, repetitions)
        rows.add(new)
        print(line(new[0]), flush=True)
        if new[0]["value"] is not None:
            rate = new[0]["value"] / bound_seconds(subject, case)
    return rows.all


def measure(subject: Subject, weights: FastWeights, case: Prompt, repetitions: int) -> list[Row]:
    """The row of a case, and for the first one how long no kernel ran; one that says why if it does not fit."""
    about = subject.conditions | {"batch": case.batch, "tokens": case.tokens} | published(subject.config, case)
    bound = bound_seconds(subject, case)
    give_back(subject.device)
    try:
        model = FastTransformer(weights, make_pool(weights, tokens=case.batch * case.tokens, sequences=case.batch))
        ids = random_ids(subject.config, case.batch * case.tokens, subject.device)
        first = _timed(model, ids, case)                                 # compiles, and warms the GPU
        times = [_timed(model, ids, case) for _ in range(repetitions)]
        about["first_call_seconds"] = first
        if case.batch == 1 and case.tokens <= 8192:
            about |= expert_use(model, lambda look: _call(model, ids, case, observe=look))
            about |= _idle(model, ids, case)
        about["backends"] = {name: backend for name, backend, _ in model.operations.table()}
    except torch.cuda.OutOfMemoryError as error:
        return [make_row("prefill", CASE, subject.backend, "seconds", [], "s", bound=bound,
                         failed=f"does not fit: {str(error).splitlines()[0]}", **about)]
    return [make_row("prefill", CASE, subject.backend, "seconds", times, "s", bound=bound, clocks=clocks(), **about)]


def bound_seconds(subject: Subject, case: Prompt) -> float:
    """The datasheet's least time (cost.prefill_bound)."""
    return prefill_bound(subject.config, case.tokens, case.batch, subject.precision).seconds


def published(config: ModelConfig, case: Prompt) -> dict[str, Any]:
    """The published time of a batch of one on one GPU, and where it is from; nothing for other cases."""
    for row in read_published():
        if (row.model, row.plan.world, row.input_tokens, case.batch) == (config.name, 1, case.tokens, 1):
            return {"published_seconds": row.latency_s, "published_by": SOURCE}
    return {}


def line(row: Row) -> str:
    """A row as text: bound and measured in seconds, share of the bound, published over measured, spread."""
    of = row["conditions"]
    name = f"{of['tokens']} tokens x {of['batch']}"
    if row["value"] is None:
        return f"{name:24} {row['bound']:9.4f} {'-':>9}  {of['failed'][:80]}"
    known = of.get("published_seconds")
    beside = f"{known:9.3f} {known / row['value']:6.2f}x" if known else f"{'-':>9} {'-':>7}"
    rate = of["tokens"] * of["batch"] / row["value"]
    idle = f", no kernel {of['no_kernel_share']:.1%}" if "no_kernel_share" in of else ""
    reached = f"{row['bound']:9.4f} {row['value']:9.4f} {row['bound'] / row['value']:8.1%}"
    return f"{name:24} {reached} {rate:9.0f} {beside}  {row['spread'] or 0:.1%}{idle}"


def _timed(model: FastTransformer, ids: torch.Tensor, case: Prompt) -> float:
    """Seconds of one call, and its logits must be finite and not all the same."""
    synchronise(model.device)
    begin = time.perf_counter()
    logits = _call(model, ids, case)
    synchronise(model.device)
    seconds = time.perf_counter() - begin
    if not bool(torch.isfinite(logits).all()) or not float(logits.std()) > 0:
        raise RuntimeError(f"{case.name}: the logits are not finite and different from each other")
    return seconds


def _call(model: FastTransformer, ids: torch.Tensor, case: Prompt, **more: Any) -> torch.Tensor:
    caches = [model.new_cache() for _ in range(case.batch)]
    try:
        return model(ids, [case.tokens] * case.batch, caches, **more)
    finally:
        for cache in caches:
            cache.release()


def _idle(model: FastTransformer, ids: torch.Tensor, case: Prompt) -> dict[str, float]:
    """The share of a prefill in which no kernel ran, and kernels launched; nothing on the CPU."""
    if model.device.type != "cuda":
        return {}
    kernels = record(lambda: _call(model, ids, case), model.device)
    return {"no_kernel_share": round(idle_share(kernels), 5), "kernels": len(kernels)}
