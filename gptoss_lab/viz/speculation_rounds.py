"""Rounds of a real run, one by one: what a round yields against 1 + a + ... + a^k, both with their intervals.

A prediction is worth something only if it was made elsewhere. So a, the chance that a proposal stands, is counted in
rounds of one proposal, and then has to foretell rounds of 2, 4 and 8. Rounds that propose fewer because their answer
ends are left out. Intervals are of 95 %: Wilson's for the share, the normal one for the mean of a round.

What is lost: rounds of one sequence are not quite independent of each other, so the intervals are a little too narrow.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import plotly.graph_objects as go

from gptoss_lab.cost.speculation import tokens_per_round
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model import Transformer
from gptoss_lab.viz import style

Z95 = 1.959963984540054
Interval = tuple[float, float, float]
"""Low, estimate, high."""


@dataclass
class Rounds(Acceptance):
    """Counts that also keep every round. each: (proposed, accepted)."""

    each: list[tuple[int, int]] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        """One round; see `Acceptance.add`."""
        super().add(proposed, accepted)
        self.each.append((proposed, accepted))


def run(
    model: Transformer, draft: Transformer, prompts: Sequence[Sequence[int]], draft_tokens: int, new_tokens: int
) -> tuple[Rounds, list[tuple[int, ...]]]:
    """Greedy decoding with a draft, all prompts in one batch: every round, and the tokens of every prompt."""
    decoder = SpeculativeDecoder(model, draft, draft_tokens)
    decoder.acceptance = rounds = Rounds()
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens)
    return rounds, [done.tokens for done in Engine(model, decoder).complete(prompts, sampling)]


def wilson(stood: int, tested: int) -> Interval:
    """95 % interval of a share by Wilson's score. ValueError without a test."""
    if not 0 <= stood <= tested or not tested:
        raise ValueError(f"{stood} of {tested} stood; at least one test, and at most all of them, are expected")
    share, z2 = stood / tested, Z95**2
    centre = (share + z2 / (2 * tested)) / (1 + z2 / tested)
    half = Z95 / (1 + z2 / tested) * math.sqrt(share * (1 - share) / tested + z2 / (4 * tested**2))
    return (0.0 if not stood else centre - half), share, (1.0 if stood == tested else centre + half)


def yield_of(rounds: Rounds, draft_tokens: int) -> Interval:
    """Tokens of a round that proposed `draft_tokens`: the mean and its 95 % interval. ValueError below two rounds."""
    found = [accepted + 1 for proposed, accepted in rounds.each if proposed == draft_tokens]
    if len(found) < 2:
        raise ValueError(f"{len(found)} rounds of {draft_tokens} proposals; at least 2 are expected")
    half = Z95 * stdev(found) / math.sqrt(len(found))
    return fmean(found) - half, fmean(found), fmean(found) + half


def foretold(ones: Rounds, draft_tokens: int) -> Interval:
    """1 + a + ... + a^k for the low, the counted and the high a of rounds with one proposal."""
    low, share, high = (tokens_per_round(a, draft_tokens) for a in wilson(ones.accepted, sum(ones.tested)))
    return low, share, high


def figure(found: Mapping[str, Mapping[int, Rounds]], what: str) -> go.Figure:
    """found: draft -> proposals of a round -> its rounds; 1 must be among the proposals, and only foretells."""
    fig, inside, points = go.Figure(), 0, 0
    longest = max(k for runs in found.values() for k in runs)
    line = list(range(1, longest + 1))
    for colour, (name, runs) in zip(style.PALETTE, found.items(), strict=False):
        bands = [foretold(runs[1], k) for k in line]
        fig.add_scatter(x=line + line[::-1], y=[b[2] for b in bands] + [b[0] for b in bands[::-1]], fill="toself",
                        mode="lines", line={"width": 0}, fillcolor=colour, opacity=0.2, hoverinfo="skip",
                        showlegend=False)
        fig.add_scatter(x=line, y=[b[1] for b in bands], mode="lines", line={"color": colour, "dash": "dot"},
                        name=f"{name}: foretold, a = {runs[1].acceptance:.2f}")
        lengths = sorted(k for k in runs if k > 1)
        means = [yield_of(runs[k], k) for k in lengths]
        fig.add_scatter(x=lengths, y=[m[1] for m in means], mode="markers", name=f"{name}: counted",
                        marker={"color": colour, "size": 9},
                        error_y={"type": "data", "array": [m[2] - m[1] for m in means], "color": colour})
        points += len(lengths)
        inside += sum(meet(means[n], foretold(runs[1], k)) for n, k in enumerate(lengths))
    fig.update_xaxes(title_text="proposals of a round, k", dtick=1)
    fig.update_yaxes(title_text="tokens of a round", rangemode="tozero")
    return style.finish(fig, f"At {inside} of {points} lengths the foretold and the counted interval meet", "live",
                        what, height=460, legend={"y": -0.22})


def meet(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a point in common."""
    return one[0] <= other[2] and other[0] <= one[2]
