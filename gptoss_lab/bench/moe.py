"""The MoE on a GPU: every kernel and the whole layer, ours against DeepGEMM and torch, checked, then timed in turn.

Shapes are gpt-oss's: hidden and intermediate 2880, four experts of 32 or 128 per token, bf16 hidden states. From 129
tokens on (prefill) the GEMMs are compute; up to 128 (decode) they read the weights of the experts that were hit. A
decode layer is timed as `DECODE_LAYERS` successive layers in one CUDA graph, with different hidden states and so mostly
different experts, divided by their number: that is how an engine runs it. Bound: the larger of FLOPs / 1979 TFLOP/s
(e4m3; 989 for bf16) and bytes / 4.8 TB/s, of the datasheet; FLOPs count real rows, bytes touched weights once.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.moe import combine, decode_cuda, deepgemm, gemm_cuda, route
from gptoss_kernels.moe.layer import moe_layer_cuda, moe_layer_deepgemm
from gptoss_kernels.quant import empty_quantised, norm_quantise, place_scales, swiglu_quantise
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups, mxfp4_decode
from gptoss_lab import results
from gptoss_lab.bench import moe_bf16, moe_inputs, timing
from gptoss_lab.bench.moe_inputs import GATE_UP, HIDDEN

COPY = "device copy of as many bytes"
TOP = 4
DECODE_LAYERS = 8
FP8_FLOPS, BF16_FLOPS, PEAK_BYTES = 1979e12, 989e12, 4.8e12
BF16_OUT, E4M3_OUT = 2e-3, 3e-2     # relative error, norm over norm, against dequantised fp32
BIAS_OR_NONE = ", bias or none"     # a kernel of this name takes turns with itself alone, PAIRED times as often
PAIRED = 3
CHAIN_BF16 = "torch bf16 grouped_mm, GEMMs alone"
LAYER_BF16 = "torch bf16 chain"


@dataclass(frozen=True)
class Case:
    """experts of the layer, tokens, and the skew of the routing (0: uniform)."""

    experts: int
    tokens: int
    skew: float = 0.0

    @property
    def name(self) -> str:
        """For example "E128/T8192/uniform"."""
        return f"E{self.experts}/T{self.tokens}/{'skew' + format(self.skew, 'g') if self.skew else 'uniform'}"

    @property
    def decode(self) -> bool:
        return self.tokens <= 128


CASES = tuple(
    Case(experts, tokens, skew)
    for experts in (128, 32)
    for tokens, skew in ((8192, 0.0), (32768, 0.0), (1, 0.0), (8, 0.0), (32, 0.0), (128, 0.0), (8192, 1.0), (2048, 0.0),
                         (128, 1.0))
)


@dataclass(frozen=True)
class Run:
    """What to time: the kernel and backend, the call, what it must do, and its peer (a backend of the same kernel)."""

    kernel: str
    backend: str
    call: Callable[[], Any]
    flops: float = 0.0
    bytes: float = 0.0
    peer: str | None = None
    peak: float = FP8_FLOPS
    divisor: int = 1

    @property
    def bound_seconds(self) -> float:
        return max(self.flops / self.peak, self.bytes / PEAK_BYTES)


class Inputs:
    """Hidden states, routing and the intermediate results of a case, each made by the kernels that are timed."""

    def __init__(self, case: Case, weights: moe_inputs.Weights) -> None:
        self.case, self.weights = case, weights
        bias = moe_inputs.router_bias(case.experts, case.skew)
        self.layers = {form: weights.layer(form, bias) for form in ("fp8", "mxfp4")}
        self.x = moe_inputs.hidden(case.tokens)
        self.layer = self.layers["fp8"]
        self.r = moe_inputs.routed(self.x, self.layer, decode_cuda.TILE if case.decode else gemm_cuda.TILE_M)
        counts = self.r.counts.tolist()
        self.hit, self.rows, self.largest = sum(c > 0 for c in counts), sum(counts), max(counts)
        self.live = int((self.r.tile_expert >= 0).sum()) * self.r.align

    def weight_bytes(self, form: str, rows: int) -> float:
        """Bytes of `rows` weight rows (with scales) of every expert that was hit."""
        return self.hit * rows * HIDDEN * (1.0 if form == "fp8" else 17 / 32)


def check(name: str, ours: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """RuntimeError unless ours is within the relative tolerance of exact; NaN never is."""
    error = ((ours.float() - exact).norm() / exact.norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"{name}: relative error {error:.2e}, at most {tolerance:.0e} is right")


def checked_rows(given: Inputs, experts: int = 2, rows: int = 256) -> list[tuple[int, torch.Tensor]]:
    """(expert, its first rows) for a few experts that were hit."""
    hit = (given.r.counts > 0).nonzero().flatten()[-experts:].tolist()
    return [(e, given.r.starts[e].long() + torch.arange(min(rows, int(given.r.counts[e])), device="cuda")) for e in hit]


def dequantised(q: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of e4m3 groups, in fp32."""
    return dequantise_groups(q.view(torch.uint8)[rows].view(torch.float8_e4m3fn), scale[rows])


def exact_product(given: Inputs, name: str, form: str, expert: int, a: torch.Tensor) -> torch.Tensor:
    """a [R, 2880] fp32 times the dequantised weight, plus the bias, in fp32."""
    m = (given.weights.fp8 if form == "fp8" else given.weights.packed)[name]
    dense = dequantise_blocks if form == "fp8" else mxfp4_decode
    bias = given.weights.gate_up_bias if name == "gate_up" else given.weights.down_bias
    return a @ dense(m.values[expert], m.scales[expert]).T + bias[expert]


def prefill_runs(given: Inputs) -> list[Run]:
    """The kernels and layers of a prefill, checked."""
    r, w, x, layer = given.r, given.weights, given.x, given.layer
    q, s = norm_quantise(x, layer.norm, row_of=r.row_of, rows=r.rows)
    gu, dn = w.fp8["gate_up"], w.fp8["down"]
    rows = norm_quantise(x, layer.norm)
    fused = partial(gemm_cuda.grouped_gemm, rows.values, place_scales(rows.scale, r.token_of), gu.values, gu.scales,
                    w.gate_up_bias, r.counts, token_of=r.token_of, swiglu=True)
    h, hs = fused()
    runs = [Run("gemm1 with swiglu", "cuda", fused, 2.0 * given.rows * GATE_UP * HIDDEN,
                given.weight_bytes("fp8", GATE_UP) + given.rows * 2 * HIDDEN)]
    for kernel, name, n, a, sa, bias in (("gemm1", "gate_up", GATE_UP, q, s, w.gate_up_bias),
                                         ("gemm2", "down", HIDDEN, h, hs, w.down_bias)):
        m = w.fp8[name]
        for e, at in checked_rows(given):
            exact = exact_product(given, name, "fp8", e, dequantised(a, sa, at))
            check(kernel, gemm_cuda.grouped_gemm(a, sa, m.values, m.scales, bias, r.counts)[at], exact, BF16_OUT)
            if kernel == "gemm1":
                check("gemm1 with swiglu", dequantised(h, hs, at), swiglu(exact), E4M3_OUT)
        runs += _gemm_runs(given, kernel, n, m, w.bf16[name], a, sa, bias)
    u = gemm_cuda.grouped_gemm(q, s, gu.values, gu.scales, None, r.counts)
    y = gemm_cuda.grouped_gemm(h, hs, dn.values, dn.scales, w.down_bias, r.counts)
    return runs + _small_runs(given, y, u) + _layer_runs(given, q, h)


def _gemm_runs(given: Inputs, kernel: str, n: int, m: Any, dense: torch.Tensor, a: torch.Tensor, sa: torch.Tensor,
               bias: torch.Tensor) -> list[Run]:
    r, live, flops = given.r, given.live, 2.0 * given.rows * n * HIDDEN
    amount = given.weight_bytes("fp8", n) + given.rows * (HIDDEN + 2 * n)
    ends = (r.starts + (r.counts + r.align - 1) // r.align * r.align).int()
    row_expert, wide = r.row_expert[:live].contiguous(), torch.randn(live, HIDDEN, device="cuda").bfloat16()
    row_scale, column_scale = torch.rand(live, device="cuda"), torch.rand(given.case.experts, n, device="cuda")
    ours = partial(gemm_cuda.grouped_gemm, a, sa, m.values, m.scales)
    theirs = partial(deepgemm.grouped_gemm, a[:live], sa[:live], m.values, m.scales, row_expert)
    return [
        Run(kernel, "cuda", partial(ours, bias, r.counts), flops, amount, "deepgemm"),
        Run(kernel + BIAS_OR_NONE, "cuda", partial(ours, bias, r.counts), flops, amount),
        Run(kernel + BIAS_OR_NONE, "cuda without bias", partial(ours, None, r.counts), flops, amount, "cuda"),
        Run(kernel, "deepgemm", theirs, flops, amount),
        Run(kernel, "torch scaled_grouped_mm, rowwise scales",
            lambda: torch._scaled_grouped_mm(a[:live], m.values.transpose(1, 2), row_scale, column_scale, offs=ends,
                                             out_dtype=torch.bfloat16), flops, amount),
        Run(kernel, "torch bf16 grouped_mm", lambda: torch._grouped_mm(wide, dense.transpose(1, 2), offs=ends), flops,
            2 * amount, peak=BF16_FLOPS),
    ]


def _small_runs(given: Inputs, y: torch.Tensor, u: torch.Tensor | None) -> list[Run]:
    """Route, quantise, combine, the three together; and of a chain that neither gathers nor fuses, where they differ,
    quantise and SwiGLU."""
    r, x, layer, t, decode = given.r, given.x, given.layer, given.case.tokens, given.case.decode
    scales = 4.0 * -(-HIDDEN // 128)                                    # bytes of a row: its scales, bf16, scaled e4m3
    row, scaled = HIDDEN * 2.0, HIDDEN + scales

    def routing() -> Any:
        return route(x, layer.router, layer.router_bias, norm_weight=layer.norm, align=r.align)

    def quantise() -> Any:
        if decode:
            return norm_quantise(x, layer.norm)
        q = norm_quantise(x, layer.norm, out=empty_quantised(*x.shape, x.device, by_row=True))
        return q.values, place_scales(q.scale, r.token_of)

    def combining() -> Any:
        return combine(y, r.row_of, r.weights, residual=x)

    def together() -> None:
        routing(), quantise(), combining()

    def placed() -> Any:
        return norm_quantise(x, layer.norm, row_of=r.row_of, rows=r.rows)

    sorting = 0.0 if decode else 2 * given.rows * scales                # reads the scales and writes them sorted
    amounts = {"route": t * row, "quantise": t * (row + scaled) + sorting, "combine": t * row * (TOP + 2)}
    beside = None if decode else COPY
    runs = [Run(kernel, "triton", timing.graphed(call), 0.0, amounts[kernel], beside)
            for kernel, call in (("route", routing), ("quantise", quantise), ("combine", combining))]
    runs.append(Run("route, quantise and combine", "triton", timing.graphed(together), 0.0, sum(amounts.values())))
    if not decode:
        amounts["quantise, placed"] = t * (row + TOP * scaled)
        amounts["swiglu, separate"] = given.rows * (2 * GATE_UP + scaled)
        runs += [_copy(kernel, amount) for kernel, amount in amounts.items()]
        runs.append(Run("quantise, placed", "triton", timing.graphed(placed), 0.0, amounts["quantise, placed"], COPY))
    if u is not None:
        bias = given.weights.gate_up_bias
        runs.append(Run("swiglu, separate", "triton", lambda: swiglu_quantise(u, r.row_expert, bias), 0.0,
                        amounts["swiglu, separate"], COPY))
    return runs


def _copy(kernel: str, amount: float) -> Run:
    """What the memory gives: a plain copy that reads and writes as many bytes as the kernel does."""
    source = torch.randint(0, 255, (int(amount) // 2,), dtype=torch.uint8, device="cuda")
    return Run(kernel, COPY, timing.graphed(partial(torch.empty_like(source).copy_, source)), 0.0, amount)


def _layer_runs(given: Inputs, q: torch.Tensor, h: torch.Tensor) -> list[Run]:
    x, layer, w = given.x, given.layer, given.weights
    ours, theirs = moe_layer_cuda(x, layer), moe_layer_deepgemm(x, layer)
    check("layer against the DeepGEMM chain", (ours - x)[:4096], (theirs - x)[:4096].float(), 2e-2)
    flops = 6.0 * given.rows * HIDDEN * HIDDEN
    amount = given.weight_bytes("fp8", GATE_UP + HIDDEN) + given.case.tokens * 4 * HIDDEN
    r, live = given.r, given.live
    ends = (r.starts + (r.counts + r.align - 1) // r.align * r.align).int()
    wide = torch.randn(live, HIDDEN, device="cuda").bfloat16()

    def bf16_layer() -> torch.Tensor:
        return moe_bf16.moe_layer_bf16(x, layer, moe_bf16.Dense(**w.bf16), live)

    check("the bf16 chain against the layer", (bf16_layer() - x)[:4096], (ours - x)[:4096].float(), E4M3_OUT)

    def bf16_gemms() -> None:
        torch._grouped_mm(wide, w.bf16["gate_up"].transpose(1, 2), offs=ends)
        torch._grouped_mm(wide, w.bf16["down"].transpose(1, 2), offs=ends)

    return [Run("layer", "cuda", timing.graphed(lambda: moe_layer_cuda(x, layer)), flops, amount, "deepgemm chain"),
            Run("layer", "deepgemm chain", timing.graphed(lambda: moe_layer_deepgemm(x, layer)), flops, amount),
            Run("layer", LAYER_BF16, timing.graphed(bf16_layer), flops, 2 * amount, peak=BF16_FLOPS),
            Run("layer", CHAIN_BF16, bf16_gemms, flops, 2 * amount, peak=BF16_FLOPS)]


def decode_runs(given: Inputs) -> list[Run]:
    """The kernels and layers of a decode step, both weight forms, checked."""
    r, x, w = given.r, given.x, given.weights
    q, s = norm_quantise(x, given.layer.norm)
    runs: list[Run] = []
    y = torch.empty(0)
    for form in ("fp8", "mxfp4"):
        m = w.fp8 if form == "fp8" else w.packed
        h, hs = decode_cuda.decode_gemm(q, s, m["gate_up"], w.gate_up_bias, r, gather=True, swiglu=True)
        y = decode_cuda.decode_gemm(h, hs, m["down"], w.down_bias, r)
        for e, at in checked_rows(given):
            tokens = r.token_of[at].long()
            exact = exact_product(given, "gate_up", form, e, dequantised(q, s, tokens))
            check(f"decode gemm1, {form}", dequantised(h, hs, at), swiglu(exact), E4M3_OUT)
            exact = exact_product(given, "down", form, e, dequantised(h, hs, at))
            check(f"decode gemm2, {form}", y[at], exact, BF16_OUT)
        peer = None if form == "fp8" else "cuda, fp8 weights"
        first = partial(decode_cuda.decode_gemm, q, s, m["gate_up"], w.gate_up_bias, r, gather=True, swiglu=True)
        second = partial(decode_cuda.decode_gemm, h, hs, m["down"], w.down_bias, r)
        layer, states = given.layers[form], [moe_inputs.hidden(given.case.tokens, i) for i in range(DECODE_LAYERS)]
        runs += [
            Run("gemm1 with swiglu", f"cuda, {form} weights", timing.graphed(first), 0.0,
                given.weight_bytes(form, GATE_UP), peer),
            Run("gemm2", f"cuda, {form} weights", timing.graphed(second), 0.0, given.weight_bytes(form, HIDDEN), peer),
            Run("layer", f"cuda, {form} weights",
                timing.graphed(lambda layer=layer, states=states: [moe_layer_cuda(x, layer) for x in states]), 0.0,
                _touched(states, layer) * (GATE_UP + HIDDEN) * HIDDEN * (1.0 if form == "fp8" else 17 / 32), peer,
                divisor=DECODE_LAYERS),
        ]
    return runs + _small_runs(given, y, None)


def _touched(states: Sequence[torch.Tensor], layer: Any) -> float:
    """Experts hit per layer, the mean over the layers of the graph."""
    hits = [int((moe_inputs.routed(x, layer, decode_cuda.TILE).counts > 0).sum()) for x in states]
    return sum(hits) / len(hits)


def _in_turn(runs: Mapping[str, Run], repetitions: int) -> dict[str, list[float]]:
    """Seconds of every run. What a bias costs is less than what the clocks do from round to round, so a product with
    its bias and without takes turns with nothing else: what ran before it is always itself."""
    together: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, run in runs.items():
        together.setdefault(run.kernel if run.kernel.endswith(BIAS_OR_NONE) else "", {})[name] = run.call
    readings: dict[str, list[float]] = {}
    for pair, calls in together.items():
        readings |= timing.interleaved(calls, repetitions * (PAIRED if pair else 1))
    return {name: [t / run.divisor for t in readings[name]] for name, run in runs.items()}


def measure(given: Inputs, repetitions: int) -> list[dict[str, Any]]:
    """Result rows: microseconds, and TFLOP/s or GB/s, of every run of the case."""
    case = given.case
    runs = {f"{run.kernel}|{run.backend}": run for run in (decode_runs if case.decode else prefill_runs)(given)}
    readings = _in_turn(runs, repetitions)
    clocks = timing.clocks_under(runs["layer|" + ("cuda, fp8 weights" if case.decode else "cuda")].call, 0.2)
    of = {"model": "gpt-oss-120b" if case.experts == 128 else "gpt-oss-20b", "tokens": case.tokens, "ep": 1, "dp": 1,
          "tp": 1, "experts": case.experts, "skew": case.skew, "experts_hit": given.hit,
          "largest_share": round(given.largest / given.rows, 4), "l2": "flushed"}
    rows = []
    for name, times in readings.items():
        run = runs[name]
        rate = ("tflops", "TFLOP/s", run.flops / 1e12) if run.flops else ("gb_per_s", "GB/s", run.bytes / 1e9)
        for metric, unit, convert in (("microseconds", "us", lambda t: t * 1e6),
                                      (rate[0], rate[1], lambda t, amount=rate[2]: amount / t)):
            beside = None
            if run.peer:
                others = sorted(readings[f"{run.kernel}|{run.peer}"])
                beside = (run.peer, convert(others[len(others) // 2]))
            rows.append(results.make_row(
                "moe", f"{run.kernel}/{case.name}", run.backend, metric, map(convert, times), unit, peer=beside,
                bound=convert(run.bound_seconds), clocks=clocks, layers_in_graph=run.divisor, **of))
    return rows


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as text: case, backend, us, rate, % of the bound, speed over the peer's, spread."""
    rows = list(rows)
    rates = {(r["case"], r["backend"]): r for r in rows if r["metric"] != "microseconds"}
    lines = []
    for row in (r for r in rows if r["metric"] == "microseconds"):
        if row["value"] is None:
            lines.append(f"{row['case']:48} {row['backend']:40} {'-':>10}  {row['conditions']['failed'][:90]}")
            continue
        rate = rates[row["case"], row["backend"]]
        against = f"{row['peer']['value'] / row['value']:6.3f}" if row["peer"] else " " * 6
        lines.append(f"{row['case']:48} {row['backend']:40} {row['value']:10.1f} {rate['value']:8.1f} {rate['unit']:7} "
                     f"{100 * row['bound'] / row['value']:5.1f}% {against}  {100 * (row['spread'] or 0):.1f}%")
    return "\n".join(lines)


def run(path: str | Path | None = None, cases: Iterable[Case] = CASES, repetitions: int = 9) -> list[dict[str, Any]]:
    """Check and time the cases, print the table as it grows, write the rows to `path` (.jsonl) after each case.

    A case that fails or does not fit leaves a row that says so. Needs a Hopper GPU; RuntimeError without one.
    """
    obstacle = gemm_cuda.obstacle("cuda") or deepgemm.obstacle("cuda", expert_form="fp8")
    if obstacle is not None:
        raise RuntimeError(f"the MoE benchmark cannot run here: {obstacle}")
    every: list[dict[str, Any]] = []
    weights: moe_inputs.Weights | None = None
    print(f"{'case':48} {'backend':40} {'us':>10} {'rate':>8}         {'bound':>6} {'peer':>6}  spread", flush=True)
    for case in cases:
        try:
            if weights is None or weights.experts != case.experts:
                weights = None                                          # free one set before the next is made
                weights = moe_inputs.Weights(case.experts)
            rows = measure(Inputs(case, weights), repetitions)
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            why = f"failed: {str(error).splitlines()[0]}"
            rows = [results.make_row("moe", f"layer/{case.name}", "all", "microseconds", [], "us", failed=why,
                                     tokens=case.tokens, experts=case.experts)]
        print(table(rows), flush=True)
        if path is not None:
            results.write_rows(path, rows)
        every += rows
        torch.cuda.empty_cache()
    return every


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: python -m gptoss_lab.bench.moe [PATH.jsonl] [--only TEXT] [--repetitions N]."""
    parser = argparse.ArgumentParser(prog="gptoss_lab.bench.moe", description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", help="where to write the rows (.jsonl)")
    parser.add_argument("--only", nargs="*", default=[""], help="only cases whose name holds one of these")
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args(arguments)
    run(given.path, [c for c in CASES if any(o in c.name for o in given.only)], given.repetitions)


if __name__ == "__main__":
    main()
