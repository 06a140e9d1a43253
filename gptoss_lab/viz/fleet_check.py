"""The simulated queue beside its closed form: the same waiting, or the simulation is wrong.

A prefill pool with one prompt length is M/D/1 with one replica; with exponential service it is M/M/c. A decode replica
whose steps grow in proportion to the batch is a server shared evenly.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from gptoss_lab.cost import queueing
from gptoss_lab.cost.fleet import Fleet, Lengths, simulate
from gptoss_lab.viz import style

LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class CheckedQueue:
    """Mean seconds by utilisation, simulated and in closed form."""

    name: str
    loads: tuple[float, ...]
    simulated: tuple[float, ...]
    exact: tuple[float, ...]


def check(loads: Sequence[float] = LOADS, longest: int = 20_000, seed: int = 0) -> list[CheckedQueue]:
    """Three queues at every load; a service takes 0.1 s in the mean, one answer has 100 further tokens.

    longest: most requests of a simulation; a queue forgets its empty start the more slowly the nearer it is to full.
    """
    md1, mm4, shared = [], [], []
    for number, load in enumerate(loads):
        rng = np.random.default_rng((seed + number, 1))  # not the stream that draws the arrivals
        one = Fleet(1, 1, lambda tokens: 0.1, [1e-9])
        four = Fleet(4, 1, lambda tokens, rng=rng: rng.exponential(0.1), [1e-9])
        batch = Fleet(500, 1, lambda tokens: 1e-9, [1e-3 * n for n in range(1, 400)])
        requests = min(longest, max(6000, round(1000 / (1 - load) ** 2)))
        run = {"inputs": Lengths(100), "requests": requests, "seed": seed + number}
        md1.append(simulate(one, 10 * load, outputs=Lengths(2), **run).mean("prefill_wait"))
        mm4.append(simulate(four, 40 * load, outputs=Lengths(2), **run).mean("prefill_wait"))
        shared.append(100 * simulate(batch, 10 * load, outputs=Lengths(101), **run).mean("per_token"))
    return [
        CheckedQueue("M/D/1: one prefill replica, wait", tuple(loads), tuple(md1),
                     tuple(queueing.mg1_mean_wait(10 * load, 0.1) for load in loads)),
        CheckedQueue("M/M/4: four replicas, wait", tuple(loads), tuple(mm4),
                     tuple(queueing.mmc_mean_wait(40 * load, 0.1, 4) for load in loads)),
        CheckedQueue("shared: one decode replica, stay", tuple(loads), tuple(shared),
                     tuple(queueing.shared_mean_stay(10 * load, 0.1) for load in loads)),
    ]


def figure(checked: Sequence[CheckedQueue]) -> go.Figure:
    """Marks are simulated, lines exact."""
    fig = go.Figure()
    for queue, colour in zip(checked, (style.BLUE, style.GREEN, style.RED), strict=True):
        x = [100 * load for load in queue.loads]
        fig.add_scatter(x=x, y=[1e3 * v for v in queue.exact], mode="lines", line={"color": colour}, name=queue.name,
                        hovertemplate="%{x:.0f} %: %{y:.1f} ms in closed form<extra></extra>")
        fig.add_scatter(x=x, y=[1e3 * v for v in queue.simulated], mode="markers", marker={"color": colour, "size": 9},
                        showlegend=False, hovertemplate="%{x:.0f} %: %{y:.1f} ms simulated<extra></extra>")
    fig.update_xaxes(title_text="utilisation, %", range=[0, 100])
    fig.update_yaxes(title_text="mean, milliseconds", type="log", dtick=1)
    return style.finish(fig, "Waiting explodes near full load, in the simulation as on paper", "modelled",
                        "marks: simulated; lines: closed forms; one service takes 100 ms")
