"""Three ways to give a bias to a GEMM that has none: what each moves, multiplies and gets wrong.

A second pass reads and writes the whole output and rounds it twice. Extra columns of K (ones in the activations, the
bias in the weights) are one more K block, and quantise the bias to e4m3. An accumulator that starts from the bias
reads the bias. Costs are modelled, errors are computed here on random data against fp64.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_kernels.moe import study
from gptoss_lab.cost import H200, Hardware
from gptoss_lab.viz import style
from gptoss_lab.viz.moe_promotion import accumulate, example, relative_error
from gptoss_lab.viz.table import Table, table

WAYS = ("second pass", "extra columns", "accumulator")
COLOURS = dict(zip(WAYS, (style.OCHRE, style.RED, style.BLUE), strict=True))
EXTRA = 128         # columns of a K block


@dataclass(frozen=True)
class BiasCost:
    """What one way adds to a GEMM: bytes moved, tensor-core FLOPs, and seconds, the larger of bytes / bandwidth and
    FLOPs / rate, as if the GEMM hid none of it. share: of the GEMM's own seconds at its bound."""

    way: str
    bytes: int
    flop: int
    seconds: float
    share: float


def costs(rows: int, n: int, k: int, experts: int, hardware: Hardware = H200) -> list[BiasCost]:
    """What each of the three ways adds to a grouped product [rows, k] by `experts` of [n, k], e4m3 in and bf16 out."""
    rate, bandwidth = hardware.flop_per_second("fp8"), hardware.memory_bytes_per_second
    gemm = max(2 * rows * n * k / rate, (experts * n * k + rows * (k + 2 * n)) / bandwidth)
    amounts = study.bias_bytes(rows, n, experts)
    found = []
    for way in WAYS:
        flop = 2 * rows * n * EXTRA if way == "extra columns" else 0
        seconds = max(amounts[way] / bandwidth, flop / rate)
        found.append(BiasCost(way, amounts[way], flop, seconds, seconds / gemm))
    return found


def costs_table(rows: int, n: int, k: int, experts: int) -> Table:
    """`costs` as a table, marked."""
    return table(
        [[c.way, f"{c.bytes / 1e6:,.1f}", f"{c.flop / 1e9:,.1f}", f"{1e6 * c.seconds:,.1f}", f"{100 * c.share:.1f}",
          "modelled"] for c in costs(rows, n, k, experts)],
        ["way", "extra MB", "extra tensor-core GFLOP", "us at the H200's datasheet rates", "% of the GEMM's bound",
         "origin"])


def costs_figure(tokens: Sequence[int], experts_per_token: int, n: int, k: int, experts: int) -> go.Figure:
    """Extra time in per cent of the GEMM's bound over the tokens of a pass. A pass touches every expert it can."""
    fig = go.Figure()
    share = {way: [] for way in WAYS}
    for t in tokens:
        hit = min(experts, t * experts_per_token)
        for cost in costs(t * experts_per_token, n, k, hit):
            share[cost.way].append(100 * cost.share)
    for way in WAYS:
        fig.add_scatter(x=list(tokens), y=share[way], mode="lines+markers", name=way, line={"color": COLOURS[way]},
                        hovertemplate="%{x} tokens: %{y:.2f} %<extra>" + way + "</extra>")
    fig.update_xaxes(type="log", title_text="tokens of the pass", tickvals=list(tokens),
                     ticktext=[f"{t:,}" for t in tokens])
    fig.update_yaxes(type="log", title_text="extra time, % of the GEMM's bound", tickvals=[0.01, 0.1, 1, 10, 100],
                     ticktext=["0.01", "0.1", "1", "10", "100"])
    return style.finish(
        fig, f"At {tokens[-1]:,} tokens a second pass costs {share['second pass'][-1]:.0f} %, the accumulator "
             f"{share['accumulator'][-1]:.2f} %",
        "modelled", f"gate/up product of {experts} experts, {k} to {n}; H200 datasheet rates, nothing hidden",
        height=440, legend={"y": -0.24})


def errors(bias_size: float, columns: Sequence[int] = (1, 2)) -> dict[str, float]:
    """Relative error of the bf16 result of each way, against fp64, for a bias `bias_size` times the product's size."""
    p = example(bias_size=bias_size)
    exact, plain = p.exact(), accumulate(p, None)
    found = {"second pass": study.bias_in_second_pass(plain, p.bias)}
    for count in columns:
        bias = study.bias_from_columns(*study.bias_as_columns(p.bias, count))
        found[f"{count} extra column{'s' * (count > 1)}"] = (plain + bias).bfloat16()
    found["accumulator"] = accumulate(p, "registers").bfloat16()
    return {way: relative_error(out, exact) for way, out in found.items()}


def errors_figure(sizes: Sequence[float] = (1 / 16, 1 / 4, 1, 4, 16)) -> go.Figure:
    """`errors` over the size of the bias."""
    found = [errors(size) for size in sizes]
    colours = dict(zip(found[0], (style.OCHRE, style.RED, style.PURPLE, style.BLUE), strict=True))
    dashes = {"2 extra columns": "dot"}
    fig = go.Figure()
    for way, colour in colours.items():
        fig.add_scatter(x=list(sizes), y=[100 * errors_of[way] for errors_of in found], mode="lines+markers", name=way,
                        line={"color": colour, "dash": dashes.get(way, "solid")},
                        hovertemplate="bias %{x} x product: %{y:.3f} %<extra>" + way + "</extra>")
    fig.update_xaxes(type="log", title_text="size of the bias / size of the product", tickvals=list(sizes),
                     ticktext=[f"1/{1 / s:g}" if s < 1 else f"{s:g}" for s in sizes])
    fig.update_yaxes(type="log", title_text="relative error, %", tickvals=[0.1, 0.2, 0.5, 1, 2, 5],
                     ticktext=["0.1", "0.2", "0.5", "1", "2", "5"])
    same = found[list(sizes).index(1)]
    return style.finish(
        fig, f"Second pass {100 * same['second pass']:.2f} %, one column {100 * same['1 extra column']:.2f} %, "
             f"accumulator {100 * same['accumulator']:.2f} % off at equal size",
        "live", "random data, K = 2880, e4m3 operands, bf16 result, against fp64; norm of the error over norm",
        height=440, legend={"y": -0.24})
