"""A full ring and a draft that falls: which position lies in which row before, during and after a round.

Nothing is drawn from memory of how it should be: a real pool is filled with keys that say their own position, fed a
round on trial, cut back, and read. A ring with no room for the draft is written in the same way beside it, by the same
rule (position modulo length), and shows what would have been lost.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import plotly.graph_objects as go
import torch

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.model.paged import PagedCache, PagePool, ring_pages
from gptoss_lab.viz import style

WINDOW, PAGE = 8, 2
SEEN, TRIAL, UNSEEN, TAKEN = "#86b2da", "#e6cf93", "#e3e8ec", "#e8b3a8"


@dataclass(frozen=True)
class Moment:
    """name: what just happened. sure: tokens that stand, the position of the next one. trial: whether the rows behind
    them are on trial, not taken back. rows: the position in each row of the ring, -1 for none."""

    name: str
    sure: int
    trial: bool
    rows: tuple[int, ...]

    @property
    def window(self) -> range:
        """The positions that the next token must see."""
        return range(max(0, self.sure - WINDOW + 1), self.sure)

    @property
    def lost(self) -> list[int]:
        """Positions of the window that the ring no longer holds."""
        return [position for position in self.window if position not in self.rows]


def round_trip(draft: int, room: int, length: int, accepted: int) -> list[Moment]:
    """Feed 1 + draft tokens to a sequence of `length` and keep 1 + accepted, in a ring with room for `room` of them.

    With room >= draft the library's own pool does it; with less it would refuse to cut back, and the rows are written
    by the ring's rule alone. ValueError for more accepted than proposed.
    """
    if not 0 <= accepted <= draft:
        raise ValueError(f"{accepted} of {draft} proposals were accepted; at most all of them can be")
    fed, kept = length + 1 + draft, length + 1 + accepted
    names = (f"{length} tokens", f"{1 + draft} more on trial",
             f"{1 + accepted} stand{'s' * (not accepted)}, {draft - accepted} taken back")
    held = [_by_rule(length, room), *[_by_rule(fed, room)] * 2] if room < draft else _by_pool(room, length, fed, kept)
    return [Moment(name, sure, trial, rows) for name, sure, trial, rows in
            zip(names, (length, length, kept), (False, True, False), held, strict=True)]


def refusal(draft: int, length: int) -> str:
    """What a pool without room says when a round is to be cut back whole."""
    pool = PagePool(_config(), pages=(length + draft) // PAGE + 3, rings=2, page_size=PAGE, draft=0,
                    dtype=torch.float32, device="cpu")
    cache = pool.new_cache()
    _feed(cache, range(length))
    _feed(cache, range(length, length + 1 + draft))
    try:
        cache.truncate(length + 1)
    except ValueError as error:
        return str(error)
    return "it was cut"


def figure(draft: int = 5, length: int = 13, accepted: int = 0) -> go.Figure:
    """Both rings, moment by moment: rows of the window coloured, lost positions named."""
    fig, lost = go.Figure(), 0
    for kind, room in (("room for the draft", draft), ("no room", 0)):
        for moment in round_trip(draft, room, length, accepted):
            name = f"{kind}: {moment.name}"
            colours = [_colour(position, moment) for position in moment.rows]
            fig.add_bar(x=[1] * len(moment.rows), base=list(range(len(moment.rows))), y=[name] * len(moment.rows),
                        orientation="h", width=0.7, marker={"color": colours, "line": {"color": "white", "width": 2}},
                        text=["" if p < 0 else str(p) for p in moment.rows], textposition="inside", textangle=0,
                        insidetextanchor="middle", showlegend=False, hoverinfo="skip", textfont={"color": style.INK})
            if moment.lost and not moment.trial:
                lost = len(moment.lost)
                fig.add_annotation(x=len(moment.rows) + 0.2, y=name, showarrow=False, xanchor="left",
                                   font={"color": style.RED},
                                   text=f"gone: {', '.join(map(str, moment.lost))}")
    for label, colour in (("the next token sees it", SEEN), ("on trial", TRIAL), ("taken back", TAKEN),
                          ("out of sight, or never written", UNSEEN)):
        fig.add_bar(x=[None], y=[None], name=label, marker_color=colour)
    fig.update_xaxes(title_text="row of the ring (position modulo its length)", showgrid=False)
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return style.finish(fig, f"Without spare rows {lost} positions are overwritten that are needed again", "live",
                        f"a window of {WINDOW}, a draft of {draft}; upper half read out of the pool, lower by its rule",
                        barmode="overlay", height=430, legend={"y": -0.2})


def _colour(position: int, moment: Moment) -> str:
    if position >= moment.sure:
        return TRIAL if moment.trial else TAKEN
    return SEEN if position in moment.window else UNSEEN


def _by_pool(room: int, length: int, fed: int, kept: int) -> list[tuple[int, ...]]:
    """What the library's pool holds at the three moments."""
    pool = PagePool(_config(), pages=fed // PAGE + 2, rings=2, page_size=PAGE, draft=room, dtype=torch.float32,
                    device="cpu")
    for keys in pool.keys:
        keys.fill_(-1)
    cache, held = pool.new_cache(), []
    for positions in (range(length), range(length, fed)):
        _feed(cache, positions)
        held.append(_held(cache))
    cache.truncate(kept)
    return [*held, _held(cache)]


def _by_rule(written: int, room: int) -> tuple[int, ...]:
    """What lies where once positions 0..written-1 were written to a ring for `room` more than a window."""
    rows = [-1] * (ring_pages(WINDOW, PAGE, room) * PAGE)
    for position in range(written):
        rows[position % len(rows)] = position
    return tuple(rows)


def _config() -> ModelConfig:
    return replace(preset("nano").with_layers(2), sliding_window=WINDOW, head_dim=2, num_heads=1, num_kv_heads=1)


def _feed(cache: PagedCache, positions: range) -> None:
    rows = torch.tensor(positions, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    for layer in cache.layers:
        layer.extend(rows, rows)
    cache.commit(len(positions))


def _held(cache: PagedCache) -> tuple[int, ...]:
    """The position that each row of the ring says it is."""
    sliding = next(n for n in range(2) if cache.pool.config.is_sliding(n))
    return tuple(int(x) for x in cache.pool.keys[sliding][cache.ring].flatten(0, 1)[:, 0, 0])
