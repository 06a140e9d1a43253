"""What choosing launch shapes for 2880 brings: each kernel launched as for 7168 and as chosen, checked, timed in turn.

Which shapes are compared, and in what sense one is "as for 7168", is `tune_launches`. Inputs are random and new in
every run (their seed is in the rows). Every launch is first compared with an exact result in fp32; then all launches
of a case are captured in CUDA graphs and timed in turn, the L2 flushed before each reading. Rows have suite "profile"
and a case that begins with "tune: "; the peer of a launch is the chosen one, and of the chosen one the first that is
not, which is the one as for 7168 where there is one.

    gptoss-lab bench tune --only product
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from gptoss_kernels.attention.triton_backend import TritonPagedDecode, TritonPrefill
from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.combine import _combine_kernel
from gptoss_kernels.moe.routing import Routing, place
from gptoss_kernels.projection.few import few_linear_kernel
from gptoss_kernels.projection.norm import norm_residual_kernel
from gptoss_kernels.quant import norm_quantise
from gptoss_kernels.quant.norm_quant import _norm_quantise_kernel, empty_scales
from gptoss_kernels.reference.fused import few_linear, norm_residual
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import dequantise_blocks
from gptoss_lab.bench import attention, moe_inputs, timing
from gptoss_lab.bench.moe import BF16_OUT, E4M3_OUT, FP8_FLOPS, PEAK_BYTES, check, dequantised
from gptoss_lab.bench.tune_launches import CASES, ROWS, Case, Launch, launches
from gptoss_lab.results import make_row

HIDDEN, GATE_UP, QKV, WIDE, TOP = 2880, 5760, 5120, 4096, 4
WHOLE = 2944                        # 2880 padded to blocks of 128
CHECKED = 256                       # rows of a product that are compared
FEW_OUT = 1e-2                      # relative error of a product of a few bf16 rows with its norm

Calls = dict[Launch, Callable[[], Any]]


@dataclass(frozen=True)
class Runs:
    """Every launch of a case, checked; the FLOPs and least bytes of the work, the same for all of them."""

    calls: Calls
    bytes: float
    flops: float = 0.0

    @property
    def bound_seconds(self) -> float:
        """The datasheet's least time, products on the e4m3 units."""
        return max(self.flops / FP8_FLOPS, self.bytes / PEAK_BYTES)


def measure(case: Case, repetitions: int, seed: int) -> list[dict[str, Any]]:
    """A row of microseconds for each launch of a case. RuntimeError for a wrong result."""
    runs = runs_of(case, seed)
    readings = timing.interleaved({launch.name: timing.graphed(call) for launch, call in runs.calls.items()},
                                  repetitions)
    clocks = timing.clocks_under(next(iter(runs.calls.values())), 0.2)
    return rows_of(case, readings, 1e6 * runs.bound_seconds, clocks, seed)


def rows_of(
    case: Case, readings: Mapping[str, list[float]], bound: float | None, clocks: Mapping[str, float] | None, seed: int
) -> list[dict[str, Any]]:
    """Rows from seconds by launch name. bound: microseconds. Launches without readings are left out."""
    timed = [launch for launch in launches(case) if launch.name in readings]
    chosen = next(launch for launch in timed if launch.chosen)
    other = next((launch for launch in timed if not launch.chosen), None)
    rows = []
    for launch in timed:
        beside = other if launch.chosen else chosen
        rows.append(make_row(
            "profile", case.name, launch.name, "microseconds", [1e6 * t for t in readings[launch.name]], "us",
            bound=bound, peer=beside and (beside.name, 1e6 * _median(readings[beside.name])), clocks=clocks,
            kernel=case.kernel, made_for=launch.made_for, chosen=launch.chosen, tokens=case.tokens, batch=case.batch,
            experts=case.experts, launch=dict(launch.options), seed=seed, l2="flushed", cuda_graph=True))
    return rows


def runs_of(case: Case, seed: int) -> Runs:
    """The launches of a case on this GPU, checked."""
    torch.manual_seed(seed)
    if case.kernel in ROWS:
        return {"norm and quantise": _quantise, "norm and residual": _norm, "combine": _combine}[case.kernel](case)
    if case.kernel in ("gate/up product", "down product"):
        return _expert_product(case, seed)
    if case.kernel in ("QKV product", "output product"):
        return _dense_product(case)
    return (_attention if "attention" in case.kernel else _few)(case)


def _expert_product(case: Case, seed: int) -> Runs:
    """One product of the experts, on rows of even routing; padded: both axes in whole blocks of 128."""
    weights, r = moe_inputs.Weights(case.experts), _placed(case.tokens, case.experts)
    a, scale = norm_quantise(moe_inputs.hidden(case.tokens, seed), row_of=r.row_of, rows=r.rows)
    up = case.kernel == "gate/up product"
    m, bias = ((weights.fp8["gate_up"], weights.gate_up_bias) if up else (weights.fp8["down"], weights.down_bias))
    n = GATE_UP if up else HIDDEN
    given = {False: (a, m.values, m.scales, bias), True: _padded(a, m.values, m.scales, bias)}

    def call(launch: Launch) -> Callable[[], Any]:
        rows, values, scales, start = given[launch.options["padded"]]
        return lambda: gemm_cuda.grouped_gemm(rows, scale, values, scales, start, r.counts, swiglu=up,
                                              columns=launch.options["columns"])

    calls = {launch: call(launch) for launch in launches(case)}
    expert = int((r.counts > 0).nonzero()[-1])
    at = r.starts[expert].long() + torch.arange(min(CHECKED, int(r.counts[expert])), device="cuda")
    exact = dequantised(a, scale, at) @ dequantise_blocks(m.values[expert], m.scales[expert]).T + bias[expert]
    for launch, run in calls.items():
        if up:
            h, h_scale = run()
            check(f"{case.name}, {launch.name}", dequantised(h, h_scale, at)[:, : n // 2], swiglu(exact), E4M3_OUT)
        else:
            check(f"{case.name}, {launch.name}", run()[at, :n], exact, BF16_OUT)
    hit, placed = int((r.counts > 0).sum()), int(r.counts.sum())
    written = placed * (n // 2 if up else 2 * n)
    return Runs(calls, hit * n * HIDDEN + placed * HIDDEN + written, 2.0 * placed * n * HIDDEN)


def _padded(
    a: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Activations [M, 2880], weights [E, N, 2880], their scales and the bias [E, N] with zeros up to 2944 along 2880
    and up to as many blocks of 64 more along N: 2944, or 5888."""
    extra, n = WHOLE - HIDDEN, values.shape[1]
    more = n // HIDDEN * extra
    blocks = -(-(n + more) // 128) - scales.shape[1]

    def zeros(x: torch.Tensor, *sides: int) -> torch.Tensor:
        return pad(x.view(torch.uint8), sides).view(torch.float8_e4m3fn).contiguous()

    return (zeros(a, 0, extra), zeros(values, 0, extra, 0, more),
            pad(scales, (0, 0, 0, blocks), value=1.0).contiguous(), pad(bias, (0, more)).contiguous())


def _dense_product(case: Case) -> Runs:
    """QKV or output projection in e4m3: the same kernel with one group; the output's is added to the stream."""
    n, k = (QKV, HIDDEN) if case.kernel == "QKV product" else (HIDDEN, WIDE)
    x, values, scales, bias = _projection(case.tokens, n, k)
    rows = -(-case.tokens // gemm_cuda.TILE_M) * gemm_cuda.TILE_M
    a, scale = norm_quantise(x, rows=rows)
    counts = torch.tensor([case.tokens], dtype=torch.int32, device="cuda")
    stream = None if n == QKV else torch.empty(case.tokens, n, dtype=torch.bfloat16, device="cuda")

    def call(launch: Launch) -> Callable[[], Any]:
        return lambda: gemm_cuda.grouped_gemm(a, scale, values[None], scales[None], bias[None], counts, out=stream,
                                              add=stream is not None, columns=launch.options["columns"])

    calls = {launch: call(launch) for launch in launches(case)}
    at = torch.arange(case.tokens - CHECKED, case.tokens, device="cuda")
    exact = dequantised(a, scale, at) @ dequantise_blocks(values, scales).T + bias
    for launch, run in calls.items():
        whole = exact if stream is None else stream.normal_()[at].float() + exact.bfloat16().float()   # rounded, added
        check(f"{case.name}, {launch.name}", run()[at], whole, BF16_OUT)
    written = 2 * n if stream is None else 4 * n                        # the stream is read as well
    return Runs(calls, case.tokens * (k + written) + n * k, 2.0 * case.tokens * n * k)


def _few(case: Case) -> Runs:
    """The same projections for a few tokens, e4m3 weights: QKV with its norm, the output one with the residual."""
    n, k = (QKV, HIDDEN) if case.kernel == "few-token QKV" else (HIDDEN, WIDE)
    x, values, scales, bias = _projection(case.tokens, n, k)
    norm = 1 + 0.1 * torch.randn(k, device="cuda") if n == QKV else None
    residual = None if n == QKV else torch.randn(case.tokens, n, device="cuda").bfloat16()
    y = torch.empty(case.tokens, n, dtype=torch.bfloat16, device="cuda")
    exact = few_linear(x.float(), values, bias, scale_inv=scales, norm_weight=norm,
                       residual=None if residual is None else residual.float())

    def call(launch: Launch) -> Callable[[], Any]:
        grid = (-(-n // launch.options["BLOCK_N"]),)
        return lambda: few_linear_kernel[grid](
            x, values, scales, bias, bias if norm is None else norm, x if residual is None else residual, y,
            case.tokens, N=n, K=k, NORM=norm is not None, RESIDUAL=residual is not None, E4M3=True, EPS=1e-5,
            **launch.options)

    return Runs(_checked(case, {launch: call(launch) for launch in launches(case)}, y, exact, FEW_OUT),
                n * k + 2 * case.tokens * (k + n * (1 if residual is None else 2)))


def _quantise(case: Case) -> Runs:
    """RMSNorm and e4m3, each row written to its place, or with experts to the places of its four."""
    x, gain = torch.randn(case.tokens, HIDDEN, device="cuda").bfloat16(), 1 + 0.1 * torch.randn(HIDDEN, device="cuda")
    in_order = torch.arange(case.tokens, dtype=torch.int32, device="cuda")[:, None]
    r = _placed(case.tokens, case.experts) if case.experts else None
    row_of, rows = (in_order, case.tokens) if r is None else (r.row_of, r.rows)
    q, scale = torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn, device="cuda"), empty_scales(rows, HIDDEN, "cuda")
    copies, exact = row_of.shape[1], rms_norm(x.float(), gain, 1e-5)

    def call(launch: Launch) -> Callable[[], Any]:
        return lambda: _norm_quantise_kernel[(case.tokens,)](
            x, gain, q, scale, row_of, *scale.stride(), H=HIDDEN, COPIES=copies, NORM=True, PLACED=r is not None,
            EPS=1e-5, **launch.options)

    calls = {launch: call(launch) for launch in launches(case)}
    for launch, run in calls.items():
        q.view(torch.uint8).fill_(0x7F)                                 # NaN, wherever nothing is written
        run()
        for copy in range(copies):
            check(f"{case.name}, {launch.name}", dequantised(q, scale, row_of[:, copy].long()), exact, E4M3_OUT)
    return Runs(calls, case.tokens * HIDDEN * (2.0 + copies))


def _norm(case: Case) -> Runs:
    x, bias = (torch.randn(*shape, HIDDEN, device="cuda").bfloat16() for shape in ((case.tokens,), ()))
    gain = 1 + 0.1 * torch.randn(HIDDEN, device="cuda")
    normed, shifted = torch.empty_like(x), torch.empty_like(x)
    exact = norm_residual(x.float(), gain, bias.float())

    def call(launch: Launch) -> Callable[[], Any]:
        return lambda: norm_residual_kernel[(case.tokens,)](
            x, gain, bias, normed, shifted, H=HIDDEN, BIAS=True, EPS=1e-5, **launch.options)

    calls = {launch: call(launch) for launch in launches(case)}
    _checked(case, calls, shifted, exact[1], BF16_OUT)
    return Runs(_checked(case, calls, normed, exact[0], BF16_OUT), 6.0 * case.tokens * HIDDEN)


def _combine(case: Case) -> Runs:
    rows = case.tokens * TOP
    y, x = (torch.randn(n, HIDDEN, device="cuda").bfloat16() for n in (rows, case.tokens))
    row_of = torch.randperm(rows, device="cuda").int().view(case.tokens, TOP)
    weights = torch.rand(case.tokens, TOP, device="cuda").softmax(dim=1)
    out = torch.empty_like(x)
    exact = x.float() + sum(weights[:, k, None] * y[row_of[:, k].long()].float() for k in range(TOP))

    def call(launch: Launch) -> Callable[[], Any]:
        return lambda: _combine_kernel[(case.tokens, -(-HIDDEN // launch.options["BLOCK_H"]))](
            y, row_of, weights, x, row_of, y, out, 0, H=HIDDEN, TOP=TOP, RESIDUAL=True, BIAS=False, **launch.options)

    return Runs(_checked(case, {launch: call(launch) for launch in launches(case)}, out, exact, BF16_OUT),
                2.0 * case.tokens * HIDDEN * (TOP + 2))


def _attention(case: Case) -> Runs:
    """The own Triton kernels: a sliding prefill, or a decode over a full cache."""
    window = case.kernel == "window attention"
    of = (attention.Case("prefill", case.tokens, case.tokens, 128) if window
          else attention.Case("decode", 1, case.tokens, batch=case.batch))
    given = attention.Inputs(of, seed=torch.initial_seed() % 2**31)

    def call(launch: Launch) -> Callable[[], Any]:
        if window:
            ends = torch.tensor([0, case.tokens])
            plan: Any = TritonPrefill(of.layer, ends, ends, device="cuda", lse=None, config=dict(launch.options))
        else:
            plan = TritonPagedDecode(of.layer, given.kv_lens.cuda(), given.page_table.cuda(), page_size=of.page_size,
                                     lse=None, programs=launch.options["programs"],
                                     config=dict(launch.options["config"]))
        return lambda: plan(given.q, *given.keys, given.sinks, given.out)

    calls = {launch: call(launch) for launch in launches(case)}
    for launch, run in calls.items():
        given.out.fill_(torch.nan)
        run()
        error = attention.sampled_error(of, given, given.out, given.sinks)
        if not error < attention.TOLERANCE:
            raise RuntimeError(f"{case.name}, {launch.name}: relative error {error:.1e}, at most "
                               f"{attention.TOLERANCE:.0e} is right")
    return Runs(calls, of.bytes(), of.flops() * FP8_FLOPS / attention.PEAK_FLOPS)      # bf16 units: twice the time


def _projection(tokens: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Random rows [T, k] bf16, an e4m3 weight [n, k] with its scales, and an fp32 bias [n]."""
    values = (40 * torch.randn(n, k, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.full((-(-n // 128), -(-k // 128)), 2.0**-11, device="cuda")
    return torch.randn(tokens, k, device="cuda").bfloat16(), values, scales, torch.randn(n, device="cuda")


def _placed(tokens: int, experts: int) -> Routing:
    """Rows of tokens that choose four of the experts evenly."""
    shares, ids = torch.rand(tokens, experts, device="cuda").topk(TOP)
    return place(ids, shares.softmax(dim=1), experts, align=gemm_cuda.TILE_M)


def _checked(case: Case, calls: Calls, out: torch.Tensor, exact: torch.Tensor, tolerance: float) -> Calls:
    """`calls`, each of which has left the right result in `out`."""
    for launch, run in calls.items():
        out.fill_(torch.nan)
        run()
        check(f"{case.name}, {launch.name}", out, exact, tolerance)
    return calls


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def run(
    path: str | Path | None = None, cases: Iterable[Case] = CASES, repetitions: int = 15, seed: int | None = None
) -> list[dict[str, Any]]:
    """Check and time the cases, print them, write the rows to `path` (.jsonl) after each case.

    seed: of the inputs, new in every run by default. Needs a Hopper GPU; RuntimeError without one.
    """
    obstacle = gemm_cuda.obstacle("cuda")
    if obstacle is not None:
        raise RuntimeError(f"the tuning benchmark cannot run here: {obstacle}")
    def measured(case: Case) -> list[dict[str, Any]]:
        return measure(case, repetitions, time.time_ns() % 2**31 if seed is None else seed)

    return timing.each_case(cases, measured, table, path)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as text: case, launch (a star at the chosen one), us, % of the bound, time over that one's, spread."""
    rows = list(rows)
    chosen = {row["case"]: row["value"] for row in rows if row["conditions"]["chosen"]}
    return "\n".join(
        f"{row['case']:36} {'*' if row['conditions']['chosen'] else ' '} {row['backend']:42} {row['value']:9.1f} us "
        f"{100 * row['bound'] / row['value']:5.1f}% {row['value'] / chosen[row['case']]:6.3f}x  "
        f"{100 * (row['spread'] or 0):.1f}%"
        for row in rows
    )
