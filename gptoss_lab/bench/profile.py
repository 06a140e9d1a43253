"""Where the time of a step goes: torch.profiler's trace and a table of it by kind of kernel, with the launch gaps.

For every kind: launches, time, share, and the grids and blocks that were launched. The gaps are the time in which no
kernel ran at all. A trace that is kept can be looked at in Perfetto or chrome://tracing.

    gptoss-lab profile --model gpt-oss-20b --phase prefill --tokens 8192 --trace results/prefill.json.gz
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptoss_lab.bench.fast_model import Row, Subject, loaded, random_ids
from gptoss_lab.bench.trace import Kernel, by_kind, gaps, record, span
from gptoss_lab.model.fast import FastTransformer, FastWeights, make_pool
from gptoss_lab.results import make_row

PHASES = ("prefill", "decode")


def run(
    subject: Subject, phase: str, tokens: int, batch: int = 1, *, trace: Path | None = None,
    weights: FastWeights | None = None, warm: int = 2,
) -> tuple[list[Row], list[Kernel]]:
    """Profile one step after `warm` others: a prefill of `tokens` in each of `batch` sequences, or a decode step at
    `tokens`. trace: where to keep the trace. Returns rows of suite "profile" and the launches."""
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; 'prefill' or 'decode'")
    weights = loaded(subject)[0] if weights is None else weights
    step = (_prefill if phase == "prefill" else _decode)(subject, weights, tokens, batch)
    for _ in range(warm):
        step()
    kernels = record(step, subject.device, trace)
    return rows(subject, kernels, phase, tokens, batch), kernels


def rows(subject: Subject, kernels: list[Kernel], phase: str, tokens: int, batch: int) -> list[Row]:
    """One row per kind, microseconds of one step, and one for the time in which no kernel ran; its `longest_gaps` are
    five of [microseconds, kernel before, kernel after]."""
    about = subject.conditions | {"phase": phase, "tokens": tokens, "batch": batch}
    whole, found = span(kernels), gaps(kernels)
    waited, longest = sum(gap.microseconds for gap in found), sorted(found, reverse=True)[:5]
    made = [
        make_row("profile", f"{phase}: {kind['kind']}", subject.backend, "microseconds", [kind["microseconds"]], "us",
                 statistic="single", share=round(kind["share"], 5), launches=kind["launches"],
                 shapes=kind["shapes"][:6], **about)
        for kind in by_kind(kernels)
    ]
    share = round(waited / whole, 5) if whole else 0.0
    made.append(make_row("profile", f"{phase}: no kernel running", subject.backend, "microseconds", [waited], "us",
                         statistic="single", share=share, launches=len(found), span_microseconds=round(whole, 1),
                         longest_gap=round(longest[0].microseconds, 2) if longest else 0.0,
                         longest_gaps=[[round(gap.microseconds, 2), gap.before[:80], gap.after[:80]]
                                       for gap in longest], **about))
    return made


def _prefill(subject: Subject, weights: FastWeights, tokens: int, batch: int) -> Callable[[], Any]:
    model = FastTransformer(weights, make_pool(weights, tokens=tokens * batch, sequences=batch))
    ids = random_ids(subject.config, tokens * batch, subject.device)

    def step() -> None:
        caches = [model.new_cache() for _ in range(batch)]
        model(ids, [tokens] * batch, caches)
        for cache in caches:
            cache.release()

    return step


def _decode(subject: Subject, weights: FastWeights, tokens: int, batch: int) -> Callable[[], Any]:
    room = tokens + 64
    model = FastTransformer(weights, make_pool(weights, tokens=room * batch, sequences=batch), sizes=(batch,),
                            max_kv_len=room)
    caches = [model.new_cache() for _ in range(batch)]
    for cache in caches:
        cache.reserve(tokens - 1)
        cache.commit(tokens - 1)
    ids = random_ids(subject.config, batch, subject.device)
    return lambda: model(ids, [1] * batch, caches)
