"""Two pools or one: GPUs, dollars and the longest pause, for several mixes of prompt and answer.

Split pools are `cost.pools`: prefill and decode on GPUs of their own, each with the plan that meets its goal at the
lowest price. The rival is one pool in which each replica does both. While a sequence writes its answer of n tokens,
each of the B sequences in its batch is replaced once by another, whose prompt is read in between. So per token

    seconds = step + B x prefill / (n - 1)        capacity = B / ((n - 1) x step + B x prefill)

and everybody's text stands still for a whole prefill whenever a prompt comes. (Reading it in chunks makes the pauses
shorter and more of them; the sum only grows.) Both sides get the same goals, plans, price and limit of use.

What is lost: queueing, as in `cost.pools`; and a shared replica's prompts and steps might be done in one pass, where
the prompt's FLOPs hide the step's bytes. That helps the shared side most at small batches.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import CostError
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.pools import MOST_UTILISATION, Goals, Pools, Traffic, size_pools
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR
from gptoss_lab.cost.sweep import sweep
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

MIXES = {"long prompt, short answer": (8192, 256), "chat": (4096, 512), "even": (1024, 1024),
         "short prompt, long reasoning": (1024, 4096)}
"""Tokens in and out."""


@dataclass(frozen=True)
class Shared:
    """One pool that does both. pause_seconds: how long all answers of a replica stand still for one prompt."""

    plan: Plan
    batch: int
    replicas: int
    seconds_per_token: float
    pause_seconds: float

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.replicas * self.plan.world

    @property
    def usd_per_day(self) -> float:
        """At the default price."""
        return 24 * self.gpus * USD_PER_GPU_HOUR


def seconds_per_token(step: float, prefill: float, batch: int, output_tokens: int) -> float:
    """Mean seconds between two tokens of a sequence in a shared replica."""
    return step + batch * prefill / (output_tokens - 1)


def capacity(step: float, prefill: float, batch: int, output_tokens: int) -> float:
    """Requests per second of a shared replica."""
    return batch / ((output_tokens - 1) * step + batch * prefill)


def size_shared(
    model: PerformanceModel, config: ModelConfig, traffic: Traffic, goals: Goals, precision: Precision = FP8_EXPERTS
) -> Shared:
    """The cheapest shared pool that meets the goals. CostError if no plan does."""
    prompts = {c.plan: c for c in sweep(model, config, "prefill", traffic.input_tokens, batches=(1,),
                                        precision=precision)}
    found = []
    for step in sweep(model, config, "decode", traffic.mean_context, precision=precision):
        prompt = prompts[step.plan].point.step_seconds
        each = seconds_per_token(step.point.step_seconds, prompt, step.batch, traffic.output_tokens)
        if not step.memory.fits or prompt > goals.first_token_seconds or each > goals.seconds_per_token:
            continue
        able = capacity(step.point.step_seconds, prompt, step.batch, traffic.output_tokens)
        replicas = math.ceil(traffic.requests_per_second / (able * MOST_UTILISATION) * (1 - 1e-12))
        found.append(Shared(step.plan, step.batch, replicas, each, prompt))
    if not found:
        raise CostError(f"shared: no plan and batch gives a token every {goals.seconds_per_token:g} s with prompts of "
                        f"{traffic.input_tokens} tokens in between")
    return min(found, key=lambda one: (one.gpus, one.seconds_per_token))


@dataclass(frozen=True)
class Both:
    """One mix, sized both ways; shared is None where no shared plan meets the goals."""

    name: str
    split: Pools
    shared: Shared | None


def sized(
    model: PerformanceModel, config: ModelConfig, requests_per_second: float, goals: Goals,
    mixes: Mapping[str, tuple[int, int]] | None = None, precision: Precision = FP8_EXPERTS,
) -> list[Both]:
    """Every mix at one rate of requests."""
    found = []
    for name, (given, wanted) in (mixes or MIXES).items():
        traffic = Traffic(requests_per_second, given, wanted)
        try:
            shared = size_shared(model, config, traffic, goals, precision)
        except CostError:
            shared = None
        found.append(Both(name, size_pools(model, config, traffic, goals, precision=precision), shared))
    return found


def saved(found: Sequence[Both]) -> float:
    """Share of the dollars of one pool that splitting saves, over the mixes that both ways can serve; 0 for none."""
    both = [(b.split.usd_per_day, b.shared.usd_per_day) for b in found if b.shared is not None]
    return 1 - sum(split for split, _ in both) / sum(shared for _, shared in both) if both else 0.0


def mixes_table(found: Sequence[Both]) -> Table:
    """One line per mix."""
    lines = []
    for both in found:
        split, shared = both.split, both.shared
        lines.append([
            f"{split.traffic.input_tokens:,} + {split.traffic.output_tokens:,}",
            *(f"{p.replicas} x {p.plan}" + (f", batch {p.batch}" if p.phase == "decode" else "")
              for p in (split.prefill, split.decode)),
            f"{1e3 * split.decode.pass_seconds:.1f}", f"{split.usd_per_day:,.0f}",
            *(["none meets the goals", "", "", ""] if shared is None else
              [f"{shared.replicas} x {shared.plan}, batch {shared.batch}", f"{1e3 * shared.seconds_per_token:.1f}",
               f"{1e3 * shared.pause_seconds:.0f}", f"{shared.usd_per_day:,.0f}"]), "modelled"])
    return table(lines, ["tokens in + out", "prefill pool", "decode pool", "split: ms a token", "$ a day", "one pool",
                         "one pool: ms a token", "pause, ms", "$ a day, one pool", "origin"])


def figure(found: Sequence[Both], basis: str) -> go.Figure:
    """GPUs of both ways, mix by mix."""
    fig = go.Figure()
    names = [f"{b.name}<br>{b.split.traffic.input_tokens:,} + {b.split.traffic.output_tokens:,}" for b in found]
    fig.add_bar(x=names, y=[b.split.prefill.gpus for b in found], name="split: prefill", offsetgroup=0,
                marker_color=style.OCHRE)
    fig.add_bar(x=names, y=[b.split.decode.gpus for b in found], base=[b.split.prefill.gpus for b in found],
                name="split: decode", offsetgroup=0, marker_color=style.BLUE)
    fig.add_bar(x=names, y=[b.shared.gpus if b.shared else 0 for b in found], name="one pool", offsetgroup=1,
                marker_color=style.GREY,
                text=[f"pause {1e3 * b.shared.pause_seconds:.0f} ms" if b.shared else "goals missed" for b in found],
                textposition="outside", cliponaxis=False, textfont={"size": 11}, constraintext="none")
    fig.update_yaxes(title_text="GPUs", rangemode="tozero")
    shares = [b.split.prefill.gpus / (b.split.prefill.gpus + b.split.decode.gpus) for b in found]
    rate = found[0].split.traffic.requests_per_second
    title = f"The prefill pool is {max(shares):.0%} to {min(shares):.0%} of the GPUs, as the mix turns"
    return style.finish(fig, title, "modelled", f"120B, {rate:g} requests/s; {basis}", height=460, barmode="group",
                        legend={"y": -0.2})
