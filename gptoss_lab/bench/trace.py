"""What ran on the device, read from torch.profiler's trace: every launch with its kind, time, grid and block.

On the CPU the outermost operators stand in for kernels, so that the same table works there. On a GPU the profiler
watches the device alone and is warm before it counts: watching every operator makes the host slower, and the gaps
between launches longer than the program has them.
"""
from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

KINDS = (
    ("attention", r"prefill_kernel|^decode_kernel|^merge_kernel|Prefill|xqa|kernel_mha|flash|sink_attention"),
    ("e4m3 and MXFP4 products", r"grouped_gemm|decode_gemm|few_experts|deep_gemm|fp8_gemm"),
    ("routing", r"_choose|_place_(scanned_)?kernel|_scan_kernel|_logits_kernel|_count_kernel"),
    ("quantise", r"_quantise|_place_rows|_place_scales"),
    ("combine", r"_combine"),
    ("rope and cache", r"rope_cache"),
    ("norm", r"norm_residual|rms_norm"),
    ("dense products", r"few_linear|gemm|cutlass|nvjet|cublas|splitK|gemv|aten::(addmm|linear|mm|matmul)"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy|index|embedding|elementwise|fill|aten::(to|empty|cat)"),
)
"""Kinds in the order in which they are tried; what fits none is "other"."""


@dataclass(frozen=True)
class Kernel:
    """One launch. start, microseconds: on the trace's clock. grid, block: threads' layout, () on the CPU."""

    name: str
    start: float
    microseconds: float
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next((kind for kind, pattern in KINDS if re.search(pattern, self.name)), "other")


def record(run: Callable[[], object], device: torch.device, trace: Path | None = None) -> list[Kernel]:
    """Run twice under torch.profiler, of which the second is kept: the first warms the profiler.

    trace: where to keep its Chrome trace (.json or .json.gz). Kernels by start.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        for last in (False, True):
            run()
            if on_gpu:
                torch.cuda.synchronize(device)
            if not last:
                profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8")
    if trace is not None:
        _keep(text, trace)
    return kernels_of(json.loads(text), on_gpu)


def kernels_of(trace: dict[str, Any], on_gpu: bool) -> list[Kernel]:
    """The launches of a Chrome trace: kernels and copies on a GPU, outermost operators on the CPU; by start.

    A kernel that was launched to overlap with the one in front (and waits for it) counts from when that one had ended,
    so times of launches add up to the time in which something ran.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in wanted),
                    key=lambda e: (e["ts"], -e["dur"]))
    found: list[Kernel] = []
    done = float("-inf")                                                 # the end of everything so far
    for event in events:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if not on_gpu and start < done:                                  # within an operator that is there
            continue
        begin = min(max(start, done), end)
        found.append(Kernel(event["name"], begin, end - begin,
                            *(tuple(event.get("args", {}).get(key, ())) for key in ("grid", "block"))))
        done = max(done, end)
    return found


class Gap(NamedTuple):
    """A stretch in which no kernel ran: how long, which kernel had ended last, and which one ended it."""

    microseconds: float
    before: str
    after: str


def span(kernels: Sequence[Kernel]) -> float:
    """Microseconds from the first start to the last end."""
    return max(k.start + k.microseconds for k in kernels) - kernels[0].start if kernels else 0.0


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """The gaps between the first start and the last end, in order; kernels by start."""
    found, end, last = [], None, ""
    for kernel in kernels:
        if end is not None and kernel.start > end:
            found.append(Gap(kernel.start - end, last, kernel.name))
        if end is None or kernel.start + kernel.microseconds > end:
            end, last = kernel.start + kernel.microseconds, kernel.name
    return found


def idle(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds of each of the `gaps`."""
    return [gap.microseconds for gap in gaps(kernels)]


def idle_share(kernels: Sequence[Kernel]) -> float:
    """The share of the span in which no kernel ran."""
    whole = span(kernels)
    return sum(idle(kernels)) / whole if whole else 0.0


def by_kind(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """One entry per kind, longest first: kind, launches, microseconds, share of all kernels' time, and the launches by
    (name, grid, block) with their count and time, longest first."""
    total = sum(k.microseconds for k in kernels) or 1.0
    kinds: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for kernel in kernels:
        shapes = kinds.setdefault(kernel.kind, {})
        shapes.setdefault((kernel.name, kernel.grid, kernel.block), []).append(kernel.microseconds)
    rows = []
    for kind, shapes in kinds.items():
        times = [t for shape in shapes.values() for t in shape]
        ordered = sorted(shapes.items(), key=lambda item: -sum(item[1]))
        rows.append({
            "kind": kind, "launches": len(times), "microseconds": sum(times), "share": sum(times) / total,
            "shapes": [{"name": name[:80], "grid": list(grid), "block": list(block), "launches": len(each),
                        "microseconds": round(sum(each), 2)} for (name, grid, block), each in ordered],
        })
    return sorted(rows, key=lambda row: -row["microseconds"])


def _keep(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
