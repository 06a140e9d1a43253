"""What of a hand-over hides behind the prefill: sent after it, chunk by chunk, or layer by layer.

The prefill is taken at its bound and divided over the layers: attention over the layers of its kind, the rest evenly.
A real one is slower, and hides more. A layer's rows can go as soon as the layer has been
computed. What sticks out is the time between the first token and the arrival of the last row.

In chunks everything of a chunk goes when the chunk is done, as `engine.disaggregation` does it. Shorter chunks leave
less for the end, but each of them reads the experts' weights again, and that is charged here too.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import SERVED, Precision, prefill_bound
from gptoss_lab.engine.disaggregation_routes import page_runs
from gptoss_lab.viz import style
from gptoss_lab.viz.disaggregation_pages import PAGE, RATES, layer_pages
from gptoss_lab.viz.table import Table, table

ENDS = ("embedding", "head")


@dataclass(frozen=True)
class Piece:
    """Something sent, or computed: seconds from the start of the prefill. layer: -1 for what is no layer's."""

    layer: int
    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """computed: the prefill's pieces, one after the other. sent: what is on the link, in order."""

    computed: tuple[Piece, ...]
    sent: tuple[Piece, ...]

    @property
    def prefill(self) -> float:
        """Seconds until the first token is there."""
        return self.computed[-1].stop

    @property
    def sticks_out(self) -> float:
        """Seconds from then until the last row has arrived; 0 if it came before."""
        return max(0.0, self.sent[-1].stop - self.prefill)

    @property
    def link_busy(self) -> float:
        """Seconds that the link sends."""
        return sum(piece.stop - piece.start for piece in self.sent)


def compute(config: ModelConfig, length: int, precision: Precision = SERVED) -> tuple[Piece, ...]:
    """The prefill's embedding, layers and head at their bounds, one after the other."""
    limit = prefill_bound(config, length, precision=precision)
    kinds = {True: sum(config.is_sliding(n) for n in range(config.num_layers))}
    kinds[False] = config.num_layers - kinds[True]
    common = sum(b.seconds for b in limit.parts if b.part.name not in (*ENDS, "attention_window", "attention_full"))
    own = {True: limit["attention_window"].seconds, False: limit["attention_full"].seconds}
    seconds = [limit["embedding"].seconds]
    for sliding in map(config.is_sliding, range(config.num_layers)):
        seconds.append(common / config.num_layers + own[sliding] / kinds[sliding])
    return _in_turn([*seconds, limit["head"].seconds])


def by_layer(config: ModelConfig, length: int, gb_per_s: float, precision: Precision = SERVED) -> Schedule:
    """Each layer's rows go once it is computed and the link is free."""
    computed, sent, free = compute(config, length, precision), [], 0.0
    for one in layer_pages(config, length):
        start = max(free, computed[one.layer + 1].stop)
        free = start + one.size / (1e9 * gb_per_s)
        sent.append(Piece(one.layer, start, free))
    return Schedule(computed, tuple(sent))


def by_chunk(
    config: ModelConfig, length: int, gb_per_s: float, chunk: int, precision: Precision = SERVED
) -> Schedule:
    """The full layers' pages go after each chunk, the windows after the last; every chunk reads the weights."""
    bounds = [prefill_bound(config, min(chunk, length - start), precision=precision, cached_tokens=start)
              for start in range(0, length, chunk)]
    computed = _in_turn([limit.sequential_seconds for limit in bounds])
    layers = layer_pages(config, length)
    row = 2 * config.kv_size * 2 * sum(not one.sliding for one in layers)
    windows = sum(one.size for one in layers if one.sliding)
    sent, free = [], 0.0
    for read, start, stop in page_runs(length, chunk, PAGE):
        begin = max(free, computed[-(-read // chunk) - 1].stop)
        size = (stop - start) * row + (windows if read == length else 0)
        free = begin + size / (1e9 * gb_per_s)
        sent.append(Piece(-1, begin, free))
    return Schedule(computed, tuple(sent))


def ways_table(
    config: ModelConfig, length: int, rates: Sequence[float] = RATES, chunks: Sequence[int] = (4096, 1024, 256)
) -> Table:
    """One line per way of sending: prefill, what sticks out at each rate, and how long until the answer goes on."""
    lines = []
    ways = [("after the prefill", lambda rate: by_chunk(config, length, rate, length)),
            *((f"after each {c:,} tokens", lambda rate, c=c: by_chunk(config, length, rate, c)) for c in chunks),
            ("layer by layer", lambda rate: by_layer(config, length, rate))]
    for name, way in ways:
        found = [way(rate) for rate in rates]
        lines.append([name, f"{1e3 * found[0].prefill:.1f}", *(f"{1e3 * one.sticks_out:.3f}" for one in found),
                      f"{1e3 * (found[0].prefill + found[0].sticks_out):.1f}", "modelled"])
    return table(lines, ["sent", "prefill, ms", *(f"sticks out at {r:g} GB/s, ms" for r in rates),
                         f"together at {rates[0]:g} GB/s, ms", "origin"])


def slowest_link(config: ModelConfig, length: int, precision: Precision = SERVED) -> float:
    """The GB/s at which nothing sticks out any more, sent layer by layer: found by halving, to 0.1 %."""
    low, high = 1e-3, 1e6
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if by_layer(config, length, middle, precision).sticks_out == 0 else (middle, high)
    return high


def figure(config: ModelConfig, length: int = 8192, gb_per_s: float = 250.0) -> go.Figure:
    """Prefill above, link below, on one axis of time, and the last layers enlarged."""
    schedule, fig = by_layer(config, length, gb_per_s), go.Figure()
    lanes = (("computed", schedule.computed), ("on the link", schedule.sent))
    last = schedule.computed[-4].start
    for name, pieces in lanes:
        for axis, begin in (("", 0.0), ("2", last)):
            shown = [piece for piece in pieces if piece.stop > begin]
            starts = [max(piece.start, begin) for piece in shown]
            fig.add_bar(x=[1e3 * (p.stop - s) for p, s in zip(shown, starts, strict=True)], y=[name] * len(shown),
                        base=[1e3 * s for s in starts], orientation="h", width=0.6, showlegend=False,
                        xaxis="x" + axis, yaxis="y" + axis,
                        marker={"color": [_colour(config, p.layer) for p in shown],
                                "line": {"color": "white", "width": 0.5 if name == "computed" else 0}},
                        customdata=[(_said(config, p.layer), 1e3 * (p.stop - p.start)) for p in shown],
                        hovertemplate="%{customdata[0]}: %{customdata[1]:.3f} ms<extra></extra>")
    for colour, name in ((style.BLUE, "full layer"), (style.OCHRE, "sliding layer"), (style.GREY, "embedding, head")):
        fig.add_bar(x=[None], y=[None], marker_color=colour, name=name)
    end = max(schedule.prefill, schedule.sent[-1].stop)
    fig.update_layout(
        yaxis={"domain": [0.6, 1], "autorange": "reversed", "showgrid": False},
        yaxis2={"domain": [0, 0.38], "autorange": "reversed", "showgrid": False, "anchor": "x2"},
        xaxis={"anchor": "y", "range": [0, 1e3 * end * 1.01]},
        xaxis2={"anchor": "y2", "range": [1e3 * last, 1e3 * (end + 0.02 * (end - last))],
                "title": {"text": "ms; below, the end of it"}})
    busy = schedule.link_busy / schedule.prefill
    out = f"{1e3 * schedule.sticks_out:.2f} ms stick out" if schedule.sticks_out else "nothing sticks out"
    title = f"Sent layer by layer {out}; the link works {busy:.0%} of the time"
    return style.finish(fig, title, "modelled", f"{config.name}, {length:,} tokens, {gb_per_s:g} GB/s; prefill at the "
                        "bound of one H200, FP8", barmode="overlay", height=440, legend={"y": -0.2})


def _in_turn(seconds: Sequence[float]) -> tuple[Piece, ...]:
    pieces, at = [], 0.0
    for n, length in enumerate(seconds):
        pieces.append(Piece(n - 1, at, at + length))
        at += length
    return tuple(pieces)


def _colour(config: ModelConfig, layer: int) -> str:
    if not 0 <= layer < config.num_layers:
        return style.GREY
    return style.OCHRE if config.is_sliding(layer) else style.BLUE


def _said(config: ModelConfig, layer: int) -> str:
    return f"layer {layer}" if 0 <= layer < config.num_layers else "embedding" if layer < 0 else "head"
