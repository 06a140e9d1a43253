"""How many proposals of a draft stand, and what that is worth: counts of real runs beside 1 + a + ... + a^k.

Who drafts and for which questions is in engine_drafts.py, what it gains in engine_speedup.py. A draft can also be made
by spoiling the model itself (`spoiled`): no noise is a draft that is always right, much noise one that guesses. Answers
end at the model's own stop ids: what it would write beyond is no text that it was made for.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from gptoss_lab.bench.speculation_drafts import spoiled as spoiled
from gptoss_lab.cost.speculation import tokens_per_round
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders import Decoder
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.decoders.mtp import Head, MtpDecoder
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model import Transformer
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def plain(model: Transformer, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
    """Greedy decoding without drafts: the tokens of every prompt."""
    return _greedy(model, PlainDecoder(model), prompts, new_tokens)


def measure_heads(
    model: Transformer, drafting: Sequence[Head], prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Acceptance, list[tuple[int, ...]]]:
    """Greedy decoding with heads: the counts, and the tokens of every prompt."""
    decoder = MtpDecoder(model, drafting)
    return decoder.acceptance, _greedy(model, decoder, prompts, new_tokens)


def measure(
    model: Transformer, draft: Transformer, prompts: Sequence[Sequence[int]], draft_tokens: int, new_tokens: int
) -> tuple[Acceptance, list[tuple[int, ...]]]:
    """Greedy decoding with a draft: the counts, and the tokens of every prompt."""
    decoder = SpeculativeDecoder(model, draft, draft_tokens)
    return decoder.acceptance, _greedy(model, decoder, prompts, new_tokens)


def _greedy(
    model: Transformer, decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens)
    return [done.tokens for done in Engine(model, decoder).complete(prompts, sampling)]


def counts_table(counts: Mapping[str, Acceptance]) -> Table:
    """name -> counts. A round of the prediction has as many proposals as the longest that was seen."""
    rows = [
        [name, c.rounds, c.proposed, c.accepted, f"{c.share:.2f}", f"{c.acceptance:.2f}", f"{c.tokens_per_round:.2f}",
         f"{tokens_per_round(c.acceptance, len(c.tested)):.2f}"]
        for name, c in counts.items()
    ]
    return table(rows, ["who drafts, and for what", "rounds", "proposed", "accepted", "of proposed", "of tested",
                        "tokens a round", "1 + a + ... + a^k"])


def places_figure(counts: Mapping[str, Acceptance], what: str) -> go.Figure:
    """How often the proposal at each place of a round stood, once those before it did."""
    fig = go.Figure()
    for colour, (name, c) in zip(style.PALETTE, counts.items(), strict=False):
        fig.add_bar(x=list(range(1, len(c.tested) + 1)), y=c.by_place, name=name, marker={"color": colour},
                    customdata=list(zip(c.stood, c.tested, strict=True)),
                    hovertemplate="place %{x}: %{customdata[0]} of %{customdata[1]} stood<extra>" + name + "</extra>")
    fig.update_xaxes(title_text="place in the round", dtick=1)
    fig.update_yaxes(title_text="stood, of those tested", range=[0, 1.05])
    shares = sorted(c.acceptance for c in counts.values())
    return style.finish(fig, f"From {shares[0]:.0%} to {shares[-1]:.0%} of the tested proposals stand", "live", what,
                        barmode="group")


def lengths_figure(found: Mapping[int, Acceptance], what: str) -> go.Figure:
    """found: draft length -> counts. Tokens of a round against the draft length, beside what independent acceptance
    predicts from the pooled share, and the ceiling k + 1."""
    lengths = sorted(found)
    stood, tested = (sum(sum(getattr(c, name)) for c in found.values()) for name in ("stood", "tested"))
    share = stood / tested if tested else 0.0
    line = list(range(1, max(lengths) + 1))
    fig = go.Figure()
    fig.add_scatter(x=line, y=[k + 1 for k in line], mode="lines", name="all stand: k + 1",
                    line={"dash": "dot", "color": style.GREY})
    fig.add_scatter(x=line, y=[tokens_per_round(share, k) for k in line], mode="lines", line={"color": style.BLUE},
                    name=f"1 + a + ... + a^k, a = {share:.2f}")
    fig.add_scatter(x=lengths, y=[found[k].tokens_per_round for k in lengths], mode="markers", name="measured",
                    marker={"color": style.RED, "size": 10})
    fig.update_xaxes(title_text="draft length k", dtick=1)
    fig.update_yaxes(title_text="tokens a round", rangemode="tozero")
    longest = lengths[-1]
    return style.finish(
        fig, f"{longest} proposals yield {found[longest].tokens_per_round:.2f} tokens a round, not {longest + 1}",
        "live", what,
    )
