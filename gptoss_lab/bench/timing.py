"""Timing on the GPU: several variants interleaved in one run, the L2 flushed before each, clocks read while it runs.

Interleaving matters more than repetition: the clocks of an H200 move by tens of per cent with load, so two kernels are
compared only if they ran in turn, within the same second.
"""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from gptoss_kernels.graph import capturing
from gptoss_lab.results import write_rows

Case = TypeVar("Case")
Row = dict[str, Any]

L2_FLUSH_BYTES = 2**28


def each_case(
    cases: Iterable[Case], measure: Callable[[Case], list[Row]], table: Callable[[list[Row]], str],
    path: str | Path | None,
) -> list[Row]:
    """Measure the cases in turn; print each one's rows and write them to `path` (.jsonl) before the next begins."""
    every: list[Row] = []
    for case in cases:
        rows = measure(case)
        print(table(rows), flush=True)
        if path is not None:
            write_rows(path, rows)
        every += rows
        torch.cuda.empty_cache()
    return every


def interleaved(
    runs: Mapping[str, Callable[[], object]], repetitions: int, warm_seconds: float = 0.15
) -> dict[str, list[float]]:
    """Seconds of each of `runs`, `repetitions` readings apiece, taken in rounds, every round in another order.

    The clocks that a run finds depend on the one before it, and the first of a round waits longest for the host.

    Each reading is one call between two CUDA events, after a write of 256 MB that empties the 60 MB L2 and keeps the
    GPU busy while Python prepares the call. Before the first reading all of them run in turn for `warm_seconds`, since
    a GPU that was idle a moment ago has not raised its clocks yet.
    """
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm_seconds:
        for run in runs.values():
            flush.zero_()
            run()
        torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    order, turns = list(runs.items()), random.Random(0)
    for _ in range(repetitions):
        turns.shuffle(order)
        for name, run in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1000 for a, b in pairs] for name, pairs in events.items()}


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """The launches of `run` captured in a CUDA graph; calling the result replays them.

    A graph holds addresses, not tensors: the result keeps `run`, and with it the plan and the buffers that it closes
    over, alive. (Without that they are freed and reused, and a replay reads another case's memory.)
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        run()

    def replay(_alive: Callable[[], object] = run) -> None:
        graph.replay()

    return replay


def clocks() -> dict[str, float] | None:
    """{"sm_mhz": ..., "watts": ...} right now, or None where NVML (the package nvidia-ml-py) is not installed."""
    try:
        return {"sm_mhz": float(torch.cuda.clock_rate()), "watts": torch.cuda.power_draw() / 1000}
    except (ModuleNotFoundError, RuntimeError):
        return None


def clocks_under(run: Callable[[], object], seconds: float) -> dict[str, float] | None:
    """The clocks while `run` is repeated back to back for about this long: what a long load sustains."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    for _ in range(max(2, min(20000, int(seconds * 1000 / max(start.elapsed_time(end), 1e-3))))):
        run()
    reading = clocks()
    torch.cuda.synchronize()
    return reading
