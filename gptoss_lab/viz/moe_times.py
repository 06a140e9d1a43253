"""Timings of the MoE: every case of the benchmark with its bound, and "not recorded yet" where there is no row.

What: result rows of the suite "moe" (recorded in data/measured, or live from this machine's GPU) as a table, and what
the bias costs: the same kernel with and without it, timed in turn.
"""
from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.layer import moe_layer_cuda, moe_layer_reference, moe_layer_triton
from gptoss_lab import results
from gptoss_lab.bench import moe as bench
from gptoss_lab.bench import moe_inputs, timing
from gptoss_lab.viz.table import Table, table

Row = Mapping[str, Any]
COLUMNS = ("case", "backend", "bound, us", "time, us", "% of bound", "rate", "against its peer", "spread, %", "origin")
BARE = "cuda without bias"
PRODUCT = ("cuda", "deepgemm", "torch scaled_grouped_mm, rowwise scales", "torch bf16 grouped_mm")
LIVE_EXPERTS, LIVE_TOKENS = 32, (8, 1024)
LARGEST = 6e-2      # relative error of the whole layer, with activations quantised twice
E4M3_FROM = (8, 9)  # compute capability from which Triton multiplies e4m3


def cases(kernel: str, decode: bool) -> list[str]:
    """Names of the benchmark's cases of a kernel ("layer", "gemm1", "gemm2", ...), prefill or decode, in its order."""
    return [f"{kernel}/{case.name}" for case in bench.CASES if case.decode == decode]


def times(rows: Iterable[Row], case: str) -> list[Row]:
    """The rows in microseconds of a case, the last one of each backend, fastest first, failed ones at the end."""
    last = {row["backend"]: row for row in rows if row["case"] == case and row["metric"] == "microseconds"}
    return sorted(last.values(), key=lambda row: (row["value"] is None, row["value"] or 0.0))


def times_table(rows: Iterable[Row], names: Sequence[str], origin: str = "recorded") -> Table:
    """One line per case and backend, bound first; absent cases say so. "against its peer": how many times as fast."""
    rows, lines = list(rows), []
    for case in names:
        found = times(rows, case)
        if not found:
            lines.append([case, "not recorded yet", *[""] * (len(COLUMNS) - 2)])
        lines += [[case, row["backend"], *_numbers(rows, row), origin] for row in found]
    return table(lines, COLUMNS)


def bias_costs(rows: Iterable[Row]) -> list[tuple[str, float, float, list[float]]]:
    """(case, us with the bias, us without, what it costs in % round by round, ascending) of our kernel.

    In a round both run within milliseconds of one another, behind nothing but themselves, so a round's ratio hardly
    knows the clocks, which move from round to round.
    """
    last = {(row["case"], row["backend"]): row for row in rows if row["metric"] == "microseconds" and row["value"]}
    found = []
    for (case, backend), bare in last.items():
        whole = last.get((case, "cuda"))
        if backend == BARE and whole is not None:
            ratios = (one / other for one, other in zip(whole["raw"], bare["raw"], strict=True))
            found.append((case, whole["value"], bare["value"], sorted(100 * (ratio - 1) for ratio in ratios)))
    return found


def bias_table(rows: Iterable[Row], origin: str = "recorded") -> Table:
    """`bias_costs` as a table: the median of the rounds and their middle half; one line that says so where nothing is
    recorded."""
    lines = [[case, f"{with_bias:,.1f}", f"{without:,.1f}", f"{statistics.median(costs):+.2f}",
              f"{costs[len(costs) // 4]:+.2f} to {costs[-1 - len(costs) // 4]:+.2f}", origin]
             for case, with_bias, without, costs in bias_costs(rows)]
    return table(lines or [["not recorded yet", *[""] * 5]], [
        "case", "with the bias, us", "without, us", "bias costs, %", "in half of the rounds, %", "origin"])


def products_table(rows: Iterable[Row], names: Sequence[str], origin: str = "recorded") -> Table:
    """One line per product: ours with the bias beside those of others without, all timed in turn, in microseconds.

    names: cases of kernels "gemm1" and "gemm2". "over ours": DeepGEMM's time over ours. Absent cases say so.
    """
    rows, lines = list(rows), []
    for case in names:
        found = {row["backend"]: row for row in times(rows, case) if row["value"] is not None}
        if PRODUCT[0] not in found:
            lines.append([case, "", "not recorded yet", *[""] * 6, ""])
            continue
        ours, theirs = (found.get(name) for name in PRODUCT[:2])
        spread = max(found[name]["spread"] or 0.0 for name in PRODUCT[:2] if name in found)
        lines.append([
            case, f"{ours['bound']:,.1f}", f"{ours['value']:,.1f}", f"{100 * ours['bound'] / ours['value']:.0f}",
            *(f"{found[name]['value']:,.1f}" if name in found else "" for name in PRODUCT[1:]),
            f"{theirs['value'] / ours['value']:.2f}" if theirs else "", f"{100 * spread:.1f}", origin])
    return table(lines, ["case", "bound, us", "ours, with bias", "% of bound", "DeepGEMM", "torch e4m3, row scales",
                         "torch bf16", "DeepGEMM over ours", "spread of the two, %", "origin"])


def epilogue_table(rows: Iterable[Row], origin: str = "recorded") -> Table:
    """The first product and a separate SwiGLU kernel beside the fused product, in microseconds, where recorded."""
    last = {(row["case"], row["backend"]): row["value"] for row in rows
            if row["metric"] == "microseconds" and row["value"] is not None}
    lines = []
    for case in (name.removeprefix("gemm1/") for name in cases("gemm1", decode=False)):
        product, fused = (last.get((f"{kernel}/{case}", "cuda")) for kernel in ("gemm1", "gemm1 with swiglu"))
        separate = last.get((f"swiglu, separate/{case}", "triton"))
        if product and fused and separate:
            lines.append([case, f"{product:,.1f}", f"{separate:,.1f}", f"{product + separate:,.1f}", f"{fused:,.1f}",
                          f"{100 * (1 - fused / (product + separate)):.0f}", origin])
    return table(lines or [["not recorded yet", *[""] * 6]],
                 ["case", "product, us", "SwiGLU, separate", "both", "fused", "saved, %", "origin"])


def live(repetitions: int = 5) -> tuple[list[Row], str]:
    """The whole layer timed on this machine's GPU, checked first, and a line that says on what, or why there is none.

    One layer of gpt-oss-20b with random weights (1.3 GB): the CUDA kernels where they run, and the Triton form.
    """
    if not torch.cuda.is_available():
        return [], "torch sees no GPU here: nothing is timed live"
    name = torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() < E4M3_FROM:
        return [], f"{name} has no e4m3 arithmetic: nothing is timed live"
    weights = moe_inputs.Weights(LIVE_EXPERTS)
    layer = weights.layer("fp8", moe_inputs.router_bias(LIVE_EXPERTS, 0.0))
    layers = {"triton": moe_layer_triton}
    if gemm_cuda.obstacle("cuda") is None:
        layers = {"cuda": moe_layer_cuda, **layers}
    rows: list[Row] = []
    for tokens in LIVE_TOKENS:
        x = moe_inputs.hidden(tokens)
        exact = moe_layer_reference(x, layer, residual=False).float()
        for backend, run in layers.items():
            bench.check(backend, run(x, layer, residual=False), exact, LARGEST)
        readings = timing.interleaved({b: lambda run=run, x=x: run(x, layer) for b, run in layers.items()}, repetitions)
        bound = 1e6 * _bound_seconds(tokens, x, layer) if "H200" in name else None
        rows += [results.make_row("moe", f"layer/{bench.Case(LIVE_EXPERTS, tokens).name}", backend, "microseconds",
                                  [1e6 * t for t in found], "us", bound=bound, model="gpt-oss-20b", tokens=tokens)
                 for backend, found in readings.items()]
    return rows, f"{name}, {repetitions} readings each, median; launches included"


def _bound_seconds(tokens: int, x: torch.Tensor, layer: Any) -> float:
    """Larger of e4m3 FLOPs and bytes of the experts hit, at the datasheet's rates."""
    hit = int((moe_inputs.routed(x, layer, 16).counts > 0).sum())
    flop = 6.0 * tokens * bench.TOP * moe_inputs.HIDDEN**2
    return max(flop / bench.FP8_FLOPS, hit * 3 * moe_inputs.HIDDEN**2 / bench.PEAK_BYTES)


def _numbers(rows: Sequence[Row], row: Row) -> list[str]:
    """bound, time, per cent, rate, against the peer, spread as text."""
    bound = "" if row["bound"] is None else f"{row['bound']:,.1f}"
    if row["value"] is None:
        return [bound, f"failed: {row['conditions']['failed']}", "", "", "", ""]
    share = "" if row["bound"] is None else f"{100 * row['bound'] / row['value']:.0f}"
    rate = next((f"{r['value']:,.0f} {r['unit']}" for r in reversed(rows) if r["metric"] in ("tflops", "gb_per_s")
                 and r["value"] is not None and all(r[k] == row[k] for k in ("case", "backend", "commit", "date"))), "")
    peer = f"{row['peer']['value'] / row['value']:.2f} x {row['peer']['name']}" if row["peer"] else ""
    return [bound, f"{row['value']:,.1f}", share, rate, peer, f"{100 * (row['spread'] or 0):.1f}"]
