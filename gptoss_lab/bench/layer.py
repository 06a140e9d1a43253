"""The small kernels of a layer and the dense products around attention, on a GPU: ours against torch, with the bound.

Shapes are gpt-oss's: hidden 2880, QKV 5120, heads 4096 wide. Up to 128 tokens a product reads its weights and little
else, above it multiplies. Each form includes what a layer would run with it: the norm, its quantisation, the residual
where it can take it (the two e4m3 forms of the output projection cannot). Every result is checked against its plain
form before it is timed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from gptoss_kernels.moe import decode_cuda, gemm_cuda
from gptoss_kernels.projection import (
    MOST_TOKENS,
    few_linear_cuda,
    few_linear_triton,
    norm_residual_triton,
    row_plan,
)
from gptoss_kernels.projection.few_cuda import few_form
from gptoss_kernels.projection.linear import fp8_linear_cuda
from gptoss_kernels.quant import norm_quantise
from gptoss_kernels.reference.fused import fp8_linear, norm_residual, rope_cache
from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies, rope_table
from gptoss_kernels.rope import rope_cache_triton
from gptoss_lab.bench import timing
from gptoss_lab.results import make_row

HIDDEN, QKV, WIDE, HEADS, KV_HEADS, D, PAGE = 2880, 5120, 4096, 64, 8, 64, 64
PEAK_BYTES, FP8_FLOPS, BF16_FLOPS = 4.8e12, 1979e12, 989e12
CHECKED = 256                   # rows that are compared


@dataclass(frozen=True)
class Case:
    """All kernels for so many tokens."""

    tokens: int

    @property
    def name(self) -> str:
        """For example "T8192"."""
        return f"T{self.tokens}"


CASES = tuple(Case(t) for t in (1, 8, 16, 32, 64, 128, 8192, 32768))


@dataclass(frozen=True)
class Run:
    """One thing to time: FLOPs, least bytes, rate of its unit, and whom it is compared with."""

    kernel: str
    backend: str
    call: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    peak: float = FP8_FLOPS
    peer: str | None = None


class Inputs:
    """Random rows and weights; the same for every form."""

    def __init__(self, tokens: int) -> None:
        g = torch.Generator("cuda").manual_seed(tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda")

        self.x, self.heads = normal(tokens, HIDDEN).bfloat16(), normal(tokens, WIDE).bfloat16()
        self.qkv, self.gain = normal(tokens, QKV).bfloat16(), 1 + 0.1 * normal(HIDDEN)
        self.weights, self.biases = {}, {}
        for name, (n, k) in {"qkv": (QKV, HIDDEN), "out": (HIDDEN, WIDE)}.items():
            values = (40 * normal(n, k)).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales = torch.full((-(-n // 128), -(-k // 128)), 2.0**-11, device="cuda")
            self.weights[name] = (values, scales, (values.float() * 2.0**-11).bfloat16())
            self.biases[name] = normal(n)
        self.positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
        self.cos, self.sin = rope_table(torch.arange(131072, device="cuda"), rope_frequencies(D).float().cuda(),
                                        rope_concentration(32.0))
        pages = tokens // PAGE + 2
        self.pages = [torch.zeros(pages, PAGE, KV_HEADS, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.slots = torch.randperm(pages * PAGE, device="cuda")[:tokens].int()


def runs_of(case: Case) -> list[Run]:
    """Every run of a case, checked. RuntimeError for a wrong result."""
    given, t = Inputs(case.tokens), case.tokens
    row = 2.0 * t * HIDDEN
    bias = given.biases["out"].bfloat16()
    normed = norm_residual_triton(given.x, given.gain, bias)
    for ours, want in zip(normed, norm_residual(given.x, given.gain, bias), strict=True):
        _check("norm_residual", ours, want, 1e-3)
    runs = [
        Run("norm and residual", "triton", lambda: norm_residual_triton(given.x, given.gain, bias), 3 * row),
        Run("norm and quantise", "triton", lambda: norm_quantise(given.x, given.gain), 1.5 * row),
        Run("rope and cache", "triton", _rope(given, rope_cache_triton), 2.0 * t * D * (2 * HEADS + 4 * KV_HEADS)),
    ]
    _check("rope_cache", _rope(given, rope_cache_triton)(), _rope(given, rope_cache)(), 1e-3)
    return runs + _products(given, t, "qkv") + _products(given, t, "out")


def _rope(given: Inputs, form: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: form(given.qkv, given.positions, given.cos, given.sin, *given.pages, given.slots, heads=HEADS)


def _products(given: Inputs, t: int, name: str) -> list[Run]:
    """A projection in both forms; e4m3 in the decode form up to 128 tokens, and in the tensor-core form."""
    values, scales, dense = given.weights[name]
    bias, gain = given.biases[name], given.gain if name == "qkv" else None
    rows = given.x if name == "qkv" else given.heads
    n, k = values.shape
    kernel = f"{name} projection"
    base = torch.zeros(t, n, dtype=torch.bfloat16, device="cuda")

    def in_bf16() -> torch.Tensor:
        if name == "out":
            return torch.addmm(base, rows, dense.t(), out=base)
        return linear(norm_residual_triton(rows, gain)[0], dense, bias.bfloat16())

    flops, amount = 2.0 * t * n * k, 2.0 * t * (n + k)
    runs = [Run(kernel, "torch bf16", in_bf16, amount + 2.0 * n * k, flops, BF16_FLOPS)]
    exact = fp8_linear(rows[:CHECKED].float(), values, scales, bias, gain)
    if t <= MOST_TOKENS:
        runs += _few(kernel, rows, given.weights[name], bias, gain, base, exact, amount)
    for form, align in (("decode", decode_cuda.TILE), ("tiles", gemm_cuda.TILE_M)):
        if form == "decode" and t > 128:
            continue
        plan = row_plan(t, align, "cuda")

        def in_e4m3(plan: Any = plan, **where: Any) -> torch.Tensor:
            return fp8_linear_cuda(rows, values, scales, bias, plan, gain, **where)

        _check(f"{kernel}, e4m3 {form}", in_e4m3()[:CHECKED], exact, 4e-2)
        runs.append(Run(kernel, f"e4m3, {form}", in_e4m3, amount + 1.0 * n * k, flops, peer="torch bf16"))
        if name == "out" and form == "tiles":
            runs += _onto_the_stream(kernel, in_e4m3, base, amount + 1.0 * n * k + 4.0 * t * n, flops)
    return runs


def _onto_the_stream(kernel: str, product: Callable[..., torch.Tensor], stream: torch.Tensor, amount: float,
                     flops: float) -> list[Run]:
    """The product added to the residual stream, as the forward of a prompt does, and by an addition of its own."""
    stream.normal_()
    want = stream + product()
    if not torch.equal(product(out=stream, add=True), want):
        raise RuntimeError(f"{kernel} onto the stream: the sum is not that of a separate addition")
    return [Run(kernel, "e4m3, tiles, onto the stream", partial(product, out=stream, add=True), amount, flops),
            Run(kernel, "e4m3, tiles, then added", lambda: stream + product(), amount, flops,
                peer="e4m3, tiles, onto the stream")]


def _few(
    kernel: str, rows: torch.Tensor, weights: tuple[torch.Tensor, ...], bias: torch.Tensor, gain: torch.Tensor | None,
    residual: torch.Tensor, exact: torch.Tensor, amount: float,
) -> list[Run]:
    """The decode form of a projection, norm or residual included, with e4m3 and with bf16 weights: as the forward runs
    it, with the tokens in shared memory first where it does not (and without where it does), and the Triton form."""
    values, scales, dense = weights
    more = {"residual": residual} if gain is None else {"norm_weight": gain}
    runs = []
    for form, weight, scaled, size in (("e4m3", values, {"scale_inv": scales}, 1.0), ("bf16", dense, {}, 2.0)):
        kernels = {"": few_linear_cuda, ", triton": few_linear_triton}
        if rows.shape[0] <= 8:
            staged = few_form(rows.shape[0], form == "e4m3")["staged"]
            kernels[", not staged" if staged else ", staged"] = partial(few_linear_cuda, staged=not staged)
        for name, run in kernels.items():
            call = partial(run, rows, weight, bias, **scaled, **more)
            _check(f"{kernel}, few tokens, {form}{name}", call(), exact + (residual if gain is None else 0), 1e-2)
            runs.append(Run(kernel, f"few, {form}{name}", call, amount + size * values.numel(), peer="torch bf16"))
    return runs


def _check(name: str, ours: torch.Tensor, exact: torch.Tensor, limit: float) -> None:
    error = float((ours.float() - exact.float()).norm() / exact.float().norm())
    if not error <= limit:
        raise RuntimeError(f"{name}: relative error {error:.2e}, at most {limit:.0e} is right")


def measure(case: Case, repetitions: int) -> list[dict[str, Any]]:
    """Rows of suite "profile": microseconds of every run, captured in graphs, in turn."""
    runs = {f"{run.kernel}|{run.backend}": run for run in runs_of(case)}
    readings = timing.interleaved({name: timing.graphed(run.call) for name, run in runs.items()}, repetitions)
    rows = []
    for name, times in readings.items():
        run, beside = runs[name], None
        if run.peer is not None:
            beside = (run.peer, 1e6 * sorted(readings[f"{run.kernel}|{run.peer}"])[repetitions // 2])
        bound = max(run.bytes / PEAK_BYTES, run.flops / run.peak)
        rows.append(make_row("profile", f"{run.kernel}/{case.name}", run.backend, "microseconds",
                             [1e6 * t for t in times], "us", bound=1e6 * bound, peer=beside, clocks=timing.clocks(),
                             tokens=case.tokens, l2="flushed", cuda_graph=True))
    return rows


def run(path: str | Path | None = None, cases: Iterable[Case] = CASES, repetitions: int = 15) -> list[dict[str, Any]]:
    """Check and time the cases, print them, write the rows to `path` (.jsonl) after each case.

    Needs a Hopper GPU; RuntimeError without one.
    """
    obstacle = gemm_cuda.obstacle("cuda")
    if obstacle is not None:
        raise RuntimeError(f"the layer benchmark cannot run here: {obstacle}")
    return timing.each_case(cases, lambda case: measure(case, repetitions), table, path)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as text: case, backend, us, % of the bound, speed over the peer's, spread."""
    return "\n".join(
        f"{row['case']:32} {row['backend']:16} {row['value']:10.1f} us {100 * row['bound'] / row['value']:5.1f}% "
        f"{row['peer']['value'] / row['value'] if row['peer'] else 1:6.2f}x  {100 * (row['spread'] or 0):.1f}%"
        for row in rows
    )
