"""Attention with sinks on a GPU: first every backend is checked, then all of them are timed in turn.

Cases are gpt-oss's own shapes: 64 query heads over 8 key heads of 64, bf16, full and sliding layers. Each case is
compared with two peers in the same run: FlashInfer's ready-made AttentionSink variant, and the same kernel without
sinks. Bound: the larger of FLOPs / 989 TFLOP/s and bytes / 4.8 TB/s, both from the datasheet.

FLOPs count the keys a query may see and no more: 4 * head_dim for each (query head, visible key). Bytes of a decode
count each visible key and value once, and the query and output.
"""
from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.attention import LayerKind, PagedDecode, PagedPrefill, Prefill
from gptoss_kernels.reference.attention import gather_pages, sink_attention
from gptoss_kernels.registry import BackendUnavailable
from gptoss_lab import results
from gptoss_lab.bench import attention_peers, timing

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12
TOLERANCE = 1e-2            # relative error of bf16 against fp32, norm over norm
BACKENDS = {
    "prefill": ("auto", "gluon", "flashinfer-fa3", "flashinfer-fa2", "triton"),
    "paged_prefill": ("auto", "flashinfer-fa3", "flashinfer-fa2", "triton"),
    "decode": ("auto", "xqa", "flashinfer-fa2", "triton"),
}


@dataclass(frozen=True)
class Case:
    """form: prefill, paged_prefill or decode. q_len new tokens and kv_len keys in each of `batch` sequences."""

    form: str
    q_len: int
    kv_len: int
    window: int | None = None
    batch: int = 1
    page_size: int = 64

    @property
    def name(self) -> str:
        """For example "prefill/full/8192" or "decode/window128/8192/batch16"."""
        kind = "full" if self.window is None else f"window{self.window}"
        size = str(self.kv_len) if self.q_len in (self.kv_len, 1) else f"{self.q_len}of{self.kv_len}"
        return f"{self.form}/{kind}/{size}" + (f"/batch{self.batch}" if self.form == "decode" else "")

    @property
    def layer(self) -> LayerKind:
        """gpt-oss's heads in bf16, with this case's window."""
        return LayerKind(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, self.window)

    def flops(self) -> float:
        """Floating-point operations of the two products over the visible keys."""
        return 4.0 * HEAD_DIM * HEADS * self.batch * visible_pairs(self.q_len, self.kv_len, self.window)

    def bytes(self) -> float:
        """Bytes that must move: keys and values any query sees, once; queries and outputs."""
        seen = self.kv_len if self.window is None else min(self.kv_len, self.q_len + self.window - 1)
        return 2.0 * self.batch * HEAD_DIM * (2 * KV_HEADS * seen + 2 * HEADS * self.q_len)

    def bound_seconds(self) -> float:
        """The datasheet's least time."""
        return max(self.flops() / PEAK_FLOPS, self.bytes() / PEAK_BYTES)


def visible_pairs(q_len: int, kv_len: int, window: int | None) -> int:
    """(query, key) pairs under the causal mask and the window; the queries are the last positions of kv_len."""
    width = kv_len if window is None else window
    first = kv_len - q_len + 1                                   # keys the first query sees without a window
    if first >= width:
        return q_len * width
    growing = min(q_len, width - first)
    return growing * first + growing * (growing - 1) // 2 + (q_len - growing) * width


PREFILL_CASES = tuple(Case("prefill", n, n, w) for n in (8192, 32768, 128000) for w in (None, 128))
PAGED_CASES = (Case("paged_prefill", 8192, 32768), Case("paged_prefill", 8192, 32768, 128))
DECODE_CASES = tuple(Case("decode", 1, 8192, w, b) for w in (None, 128) for b in (1, 16, 64, 128))
LONG_DECODE_CASES = tuple(Case("decode", 1, 32768, None, b) for b in (1, 16))
CASES = (*DECODE_CASES, *LONG_DECODE_CASES, *PREFILL_CASES, *PAGED_CASES)


class Inputs:
    """Random tensors of a case on the GPU, the caches in shuffled pages."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        pages = -(-case.kv_len // case.page_size) * case.batch
        keys = (case.kv_len,) if case.form == "prefill" else (pages, case.page_size)
        self.sinks = torch.randn(HEADS, generator=g, device="cuda") * 2
        self.no_sinks = torch.full_like(self.sinks, -torch.inf)
        self.q, *self.keys = (
            torch.randn(*shape, HEAD_DIM, generator=g, device="cuda", dtype=torch.bfloat16)
            for shape in ((case.batch * case.q_len, HEADS), (*keys, KV_HEADS), (*keys, KV_HEADS))
        )
        self.out = torch.empty_like(self.q)
        if case.form == "prefill":
            return
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.page_table = order.to(torch.int32).view(case.batch, -1)
        self.kv_lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32)


def prepare(case: Case, given: Inputs, backend: str) -> tuple[Callable[[torch.Tensor], Any], str]:
    """run(sinks) of a backend for a case, planned; and the name of the backend that was chosen."""
    if case.form == "prefill":
        plan = Prefill(case.layer, [0, case.q_len], device="cuda", backend=backend)
    elif case.form == "paged_prefill":
        plan = PagedPrefill(case.layer, [0, case.q_len], given.kv_lens, given.page_table, page_size=case.page_size,
                            device="cuda", backend=backend)
    else:
        plan = PagedDecode(case.layer, batch=case.batch, max_kv_len=case.kv_len, page_size=case.page_size,
                           device="cuda", backend=backend)
        plan.step(given.kv_lens, given.page_table)
    return lambda sinks: plan.run(given.q, *given.keys, sinks, out=given.out), plan.choice.backend


def sampled_error(case: Case, given: Inputs, out: torch.Tensor, sinks: torch.Tensor | None) -> float:
    """Relative error of `out` against the fp32 reference on rows at both ends and around the window of a sequence."""
    sequence = case.batch - 1
    if case.form == "prefill":
        k, v = given.keys
    else:
        table, lens = given.page_table[sequence:], given.kv_lens[sequence:]
        k, v = (gather_pages(x, lens, table)[0] for x in given.keys)
    n, past = case.q_len, case.kv_len - case.q_len
    rows = sorted({r for r in (0, 1, 127, 128, 129, n // 3, n // 2 + 5, n - 130, n - 2, n - 1) if 0 <= r < n})
    expected, actual = [], []
    for r in rows:
        at = sequence * n + r
        end = past + r + 1
        expected.append(sink_attention(given.q[at : at + 1].float(), k[:end], v[:end], sinks, cu_seqlens_q=[0, 1],
                                       cu_seqlens_k=[0, end], window=case.window)[0])
        actual.append(out[at : at + 1].float())
    a, b = torch.cat(actual), torch.cat(expected)
    return float((a - b).norm() / b.norm()) if bool(torch.isfinite(a).all()) else float("inf")


def gather_runs(
    case: Case, given: Inputs, backends: Iterable[str], build: bool = True
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Every run of a case that checks out, by name, and why the others are missing.

    Names: the backend; the backend + " without sinks" (the same kernel, given sinks of -inf); the peers of
    `attention_peers`, which are built first if they are not and `build` says so. A decode is captured in a CUDA graph,
    as an engine would run it.
    """
    runs: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}

    def add(name: str, run: Callable[[], Any], sinks: torch.Tensor | None) -> None:
        given.out.fill_(torch.nan)
        run()
        error = sampled_error(case, given, given.out, sinks)
        if error < TOLERANCE:
            runs[name] = timing.graphed(run) if case.form == "decode" else run
        else:
            missing[name] = f"wrong result: relative error {error:.1e}"

    for backend in backends:
        try:
            run, chosen = prepare(case, given, backend)
        except BackendUnavailable as error:
            missing[backend] = str(error)
            continue
        name = f"auto ({chosen})" if backend == "auto" else backend
        add(name, lambda run=run: run(given.sinks), given.sinks)
        if backend in ("triton", "xqa", "gluon"):
            add(f"{backend} without sinks", lambda run=run: run(given.no_sinks), None)
    found, unbuilt = attention_peers.peers(case, given, build)
    for name, (run, sinks) in found.items():
        add(name, run, sinks)
    missing |= unbuilt
    return runs, missing


def measure(
    case: Case, backends: Sequence[str] | None = None, repetitions: int = 9, build: bool = True
) -> list[dict[str, Any]]:
    """Result rows of a case: microseconds and TFLOP/s or GB/s for each run, and one for each that is missing."""
    given = Inputs(case)
    runs, missing = gather_runs(case, given, backends or BACKENDS[case.form], build)
    readings = timing.interleaved(runs, repetitions)
    first = next(iter(runs.values()), None)
    clocks = timing.clocks_under(first, 0.3) if first else None
    return [*_rows(case, readings, clocks), *(_missing_row(case, name, why) for name, why in missing.items())]


def _rows(case: Case, readings: dict[str, list[float]], clocks: dict[str, float] | None) -> list[dict[str, Any]]:
    rows = []
    work, unit, metric, peak = ((case.bytes(), "GB/s", "gb_per_s", PEAK_BYTES / 1e9) if case.form == "decode"
                                else (case.flops(), "TFLOP/s", "tflops", None))
    giga = 1e9 if case.form == "decode" else 1e12
    bound = work / giga / case.bound_seconds() if peak is None else peak
    for name, seconds in readings.items():
        peer = attention_peers.peer_of(name, readings)
        of = {"batch": case.batch, "tokens": case.kv_len, "q_len": case.q_len, "window": case.window,
              "page_size": None if case.form == "prefill" else case.page_size, "heads": HEADS, "kv_heads": KV_HEADS,
              "head_dim": HEAD_DIM, "dtype": "bf16", "l2": "flushed", "cuda_graph": case.form == "decode"}
        for kind, of_unit, convert, least in (
            ("microseconds", "us", lambda s: s * 1e6, case.bound_seconds() * 1e6),
            (metric, unit, lambda s: work / giga / s, bound),
        ):
            beside = None if peer is None else (peer, convert(_median(readings[peer])))
            rows.append(results.make_row("attention", case.name, name, kind, [convert(s) for s in seconds], of_unit,
                                         bound=least, peer=beside, clocks=clocks, **of))
    return rows


def _missing_row(case: Case, name: str, why: str) -> dict[str, Any]:
    return results.make_row("attention", case.name, name, "microseconds", [], "us", failed=why, batch=case.batch,
                            tokens=case.kv_len)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as text: case, backend, us, TFLOP/s or GB/s, % of the bound, ratio of speed to its peer, spread."""
    rows = list(rows)
    rates = {(r["case"], r["backend"]): r for r in rows if r["metric"] != "microseconds"}
    lines = [f"{'case':34} {'backend':34} {'us':>10} {'rate':>8}         {'bound':>6} {'peer':>6}  spread"]
    for row in (r for r in rows if r["metric"] == "microseconds"):
        if row["value"] is None:
            lines.append(f"{row['case']:34} {row['backend']:34} {'-':>10}  {row['conditions']['failed'][:90]}")
            continue
        rate = rates[row["case"], row["backend"]]
        against = f"{rate['value'] / rate['peer']['value']:6.3f}" if rate["peer"] else " " * 6
        lines.append(f"{row['case']:34} {row['backend']:34} {row['value']:10.1f} {rate['value']:8.0f} {rate['unit']:7} "
                     f"{100 * row['bound'] / row['value']:5.1f}% {against}  {100 * (row['spread'] or 0):.1f}%")
    return "\n".join(lines)


def run(
    path: str | Path | None = None, cases: Iterable[Case] = CASES, repetitions: int = 9, build: bool = True,
    backends: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Check and time the cases, print the table as it grows, write the rows to `path` (.jsonl) after each case.

    A case that does not fit the GPU's memory leaves a row that says so. Needs a CUDA GPU; RuntimeError without one.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the attention benchmark needs a CUDA GPU and torch sees none")
    every: list[dict[str, Any]] = []
    for case in cases:
        try:
            fewer = max(3, repetitions // 2) if case.q_len > 65536 else repetitions
            rows = measure(case, backends, fewer, build)
        except torch.cuda.OutOfMemoryError as error:
            rows = [_missing_row(case, "all", f"does not fit: {str(error).splitlines()[0]}")]
        except RuntimeError as error:
            rows = [_missing_row(case, "all", f"failed: {str(error).splitlines()[0]}")]
        print(table(rows) if not every else "\n".join(table(rows).splitlines()[1:]), flush=True)
        if path is not None:
            results.write_rows(path, rows)
        every += rows
        torch.cuda.empty_cache()
    return every


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: python -m gptoss_lab.bench.attention [PATH.jsonl] [options]; --help lists them."""
    parser = argparse.ArgumentParser(prog="gptoss_lab.bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", help="where to write the rows (.jsonl)")
    parser.add_argument("--cases", nargs="*", default=["*"], help="only cases so named, for example 'decode/full/*'")
    parser.add_argument("--backends", nargs="*", help="only these backends")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--no-build", action="store_true", help="leave out peers whose module is not built yet")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, wanted) for wanted in given.cases)]
    run(given.path, cases, given.repetitions, not given.no_build, given.backends)


if __name__ == "__main__":
    main()
