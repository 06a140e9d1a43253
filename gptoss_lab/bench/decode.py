"""One token for every sequence of a batch, as an engine runs it: captured steps, host work and all.

A step is timed from one CUDA event to the next, so a GPU that waits for the host counts. Beside it the bare replay of
the same graph says what the host costs, and the least of a few steps launched one by one what the graph saves.
Sequences lie at 8192 or 32768 tokens, in pages filled with random keys and values (what they hold changes no time;
correctness is checked before, on real ones), and take random tokens, so that they do not agree on experts; how many
experts a step really touched is in the row, since the bound assumes uniform and independent choices.

Keys and values are kept in the model's dtype, or in e4m3 (`kv_form`); the check before uses the same form.

    gptoss-lab bench decode --model gpt-oss-20b --experts mxfp4 --kv fp8
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptoss_lab.bench.fast_check import prepared
from gptoss_lab.bench.fast_model import (
    Budget,
    Row,
    Rows,
    Subject,
    expert_use,
    free_bytes,
    random_ids,
    synchronise,
)
from gptoss_lab.bench.timing import clocks
from gptoss_lab.cost import decode_bound, kv_bytes
from gptoss_lab.model.fast import FastTransformer, FastWeights, make_pool
from gptoss_lab.results import make_row

CASE = "decode"
FP8_CASE = "decode, keys and values in e4m3"
HEADER = (f"{'case':24} {'bound':>9} {'measured':>9} {'of bound':>8} {'tokens/s':>9} {'replay':>9} {'experts':>8}"
          "  spread")
RESERVE = 4 * 2**30             # bytes kept for activations, logits and workspaces


@dataclass(frozen=True)
class Batch:
    """batch sequences of `tokens` tokens each, the one that the first step brings included."""

    tokens: int
    batch: int

    @property
    def name(self) -> str:
        """For example "batch 32 at 8192"."""
        return f"batch {self.batch} at {self.tokens}"


CASES = tuple(Batch(tokens, batch) for tokens in (8192, 32768) for batch in (1, 8, 32, 128))


def run(
    subject: Subject, out: Path | None = None, cases: Sequence[Batch] = CASES, *, steps: int = 32,
    seconds: float | None = None, checked: bool = True, weights: FastWeights | None = None, kv_form: str = "same",
) -> list[Row]:
    """Lay the weights out, check them, time the cases; print the table and write each row as it is measured.

    steps: readings of each case. kv_form: "same" or "fp8", of the pages; a case of its own in the rows. Other arguments
    and errors as of `prefill.run`.
    """
    budget, rows = Budget(seconds), Rows(out)
    name = FP8_CASE if kv_form == "fp8" else CASE
    left = [case for case in cases if not rows.has("decode", name, subject, batch=case.batch, tokens=case.tokens)]
    if not left:
        return rows.all
    weights = prepared(subject, rows, weights, checked, kv_form)
    kept = ", keys and values in e4m3" if kv_form == "fp8" else ""
    print(f"{subject.config.name}, {subject.backend}{kept}\n{HEADER}", flush=True)
    longest = 0.0
    for case in left:
        if longest > budget.left():
            print(f"{case.name:24} left out: {longest:.0f} s are expected and {budget.left():.0f} s left", flush=True)
            continue
        begin = time.perf_counter()
        row = measure(subject, weights, case, steps, kv_form)
        rows.add([row])
        print(line(row), flush=True)
        longest = max(longest, time.perf_counter() - begin)
    return rows.all


def measure(subject: Subject, weights: FastWeights, case: Batch, steps: int, kv_form: str = "same") -> Row:
    """The row of a case; one that says why where it does not fit."""
    about = subject.conditions | {"batch": case.batch, "tokens": case.tokens, "kv_filled": "random"}
    precision, kept, name = subject.precision, "bf16", CASE
    if kv_form == "fp8":
        precision, kept, name = replace(precision, kv="fp8"), "fp8", FP8_CASE
        about["kv"] = "float8_e4m3fn"
    bound = 1e3 * decode_bound(subject.config, case.tokens, case.batch, precision).seconds
    free, needed = free_bytes(subject.device), case.batch * kv_bytes(subject.config, case.tokens + 2 * steps, kept)
    if free is not None and needed + RESERVE > free:
        return make_row("decode", name, subject.backend, "ms_per_step", [], "ms", bound=bound,
                        failed=no_room(needed, free - RESERVE), **about)
    try:
        times, found = _measured(subject, weights, case, steps, kv_form)
    except torch.cuda.OutOfMemoryError as error:
        return make_row("decode", name, subject.backend, "ms_per_step", [], "ms", bound=bound,
                        failed=f"does not fit: {str(error).splitlines()[0]}", **about)
    return make_row("decode", name, subject.backend, "ms_per_step", times, "ms", bound=bound, **about | found)


def no_room(needed: float, left: float, where: str = "") -> str:
    """Why keys and values of `needed` bytes are not tried where `left` bytes are."""
    return f"does not fit: {needed / 1e9:.1f} GB of keys and values{where}, {max(0, left) / 1e9:.1f} GB are left"


@torch.inference_mode()
def _measured(
    subject: Subject, weights: FastWeights, case: Batch, steps: int, kv_form: str
) -> tuple[list[float], dict[str, object]]:
    """Milliseconds of each step, and what else there is to say of a row."""
    room = case.tokens + 2 * steps + 8
    pool = make_pool(weights, tokens=case.batch * room, sequences=case.batch, kv_form=kv_form)
    model = FastTransformer(weights, pool, sizes=(case.batch,), max_kv_len=room)
    for pages in (*pool.keys, *pool.values):
        if kv_form == "fp8":                                             # nothing draws e4m3 numbers itself
            pages.copy_(torch.randn(pages.shape, dtype=weights.dtype, device=pages.device))
        else:
            pages.normal_()
    caches = [model.new_cache() for _ in range(case.batch)]
    for cache in caches:
        cache.reserve(case.tokens - 1)
        cache.commit(case.tokens - 1)
    captured = model.capture()[0]
    ids = random_ids(subject.config, steps * case.batch, subject.device).view(steps, case.batch)
    ones = [1] * case.batch
    for warm in ids[: min(3, steps)]:
        logits = model(warm, ones, caches)
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"{case.name}: the logits are not finite")
    times = intervals(model.device, [lambda row=row: model(row, ones, caches) for row in ids])
    bare = intervals(model.device, [captured.replay] * steps)
    about = expert_use(model, lambda look: model(ids[0], ones, caches, observe=look))
    model.graphs = False                                                 # launch by launch, as without graphs
    eager = intervals(model.device, [lambda: model(ids[0], ones, caches)] * min(4, steps))
    return times, about | {
        "clocks": clocks(), "capture_seconds": captured.seconds, "capture_bytes": captured.bytes,
        "replay_ms": round(sorted(bare)[len(bare) // 2], 4), "eager_ms": round(min(eager), 4),
        "kv_bytes": model.pool.bytes, "attention": [plan.choice.backend for plan in captured.decode.plans],
        "backends": {name: backend for name, backend, _ in model.operations.table()},
        "cuda_graph": subject.device.type == "cuda",
    }


def intervals(device: torch.device, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds from the start of each call's work to the start of the next one's."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for call in calls:
            call()
            moments.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in zip(moments[:-1], moments[1:], strict=True)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    synchronise(device)
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    synchronise(device)
    return [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]


def line(row: Row) -> str:
    """A row as text: bound and measured in ms, share of the bound, replay alone, experts touched per layer, spread."""
    of = row["conditions"]
    name = f"batch {of['batch']} at {of['tokens']}"
    if row["value"] is None:
        return f"{name:24} {row['bound']:9.3f} {'-':>9}  {of['failed'][:80]}"
    rate = 1e3 * of["batch"] / row["value"]
    return (f"{name:24} {row['bound']:9.3f} {row['value']:9.3f} {row['bound'] / row['value']:8.1%} {rate:9.0f} "
            f"{of['replay_ms']:9.3f} {of['experts_hit']:8.1f}  {row['spread'] or 0:.1%}")
