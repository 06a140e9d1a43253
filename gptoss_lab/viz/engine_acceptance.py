"""How many proposals of a draft stand, and what that is worth: counts of real runs beside 1 + a + ... + a^k.

A draft model for the lesson is made by spoiling the model itself: its layers' weights are moved by a share of their own
size. No noise is a draft that is always right, much noise one that guesses.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go
import torch

from gptoss_lab.bench.speculation_drafts import spoiled as spoiled
from gptoss_lab.checkpoint.compact import read_compact
from gptoss_lab.checkpoint.nano import trained_nano
from gptoss_lab.cost.speculation import StepSeconds, tokens_per_round
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders import Decoder
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.decoders.mtp import Head, MtpDecoder, load_heads
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model import Transformer
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def heads(model: Transformer, count: int = 2) -> tuple[list[Head], str]:
    """Heads for a model and what they are: those trained for the nano checkpoint, where this checkout has them and the
    model is that checkpoint, else random ones."""
    trained = trained_nano()
    file = None if trained is None else trained.with_name("mtp.safetensors")
    if file is not None and file.is_file() and _is_of(trained, model):
        return load_heads(file, model), "trained for the nano checkpoint"
    g, h = torch.Generator().manual_seed(0), model.config.hidden_size
    shapes = ((h, 2 * h, (2 * h) ** -0.5), (h, h, h**-0.5))
    drawn = [[std * torch.randn(rows, columns, generator=g) for rows, columns, std in shapes] for _ in range(count)]
    return [Head(*(w.to(model.device, model.dtype) for w in (*pair, torch.ones(h)))) for pair in drawn], "random"


def _is_of(compact: Path, model: Transformer) -> bool:
    """Whether a model has the config and the final norm of a compact file: heads read the states behind that norm, and
    a name or a shape is also that of a nano with other weights."""
    config, _, tensors = read_compact(compact)
    norm = tensors["model.norm.weight"]
    return model.config == config and torch.equal(model.norm.weight.detach().to("cpu", norm.dtype), norm)


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
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, stop_ids=())
    return [done.tokens for done in Engine(model, decoder).complete(prompts, sampling)]


def timed(
    model: Transformer, draft: Transformer, prompt: Sequence[int], draft_tokens: int, new_tokens: int
) -> tuple[StepSeconds, float]:
    """(step times, measured speed-up) of greedy decoding for one prompt: the least of five passes for each step, and
    the seconds of plain decoding over those with the draft, in one run each."""
    target, drafted = _seconds(model, prompt, 1), _seconds(draft, prompt, 1)
    steps = StepSeconds(target, drafted, _seconds(model, prompt, draft_tokens + 1))
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, stop_ids=())
    spent = []
    for decoder in (PlainDecoder(model), SpeculativeDecoder(model, draft, draft_tokens)):
        began = time.perf_counter()
        Engine(model, decoder).complete([prompt], sampling)
        spent.append(time.perf_counter() - began)
    return steps, spent[0] / spent[1]


@torch.inference_mode()
def _seconds(model: Transformer, prompt: Sequence[int], tokens: int) -> float:
    """Seconds of one pass over so many tokens after the prompt, with logits for each: the least of five."""
    cache, spent = model.new_cache(draft=tokens), []
    model(torch.tensor(prompt, device=model.device), caches=[cache], logits="none")
    for _ in range(5):
        began = time.perf_counter()
        model(torch.tensor(prompt[:1] * tokens, device=model.device), caches=[cache], logits="all").argmax(-1).tolist()
        spent.append(time.perf_counter() - began)
        cache.truncate(len(prompt))
    return min(spent)


def counts_table(counts: Mapping[str, Acceptance]) -> Table:
    """name -> counts. A round of the prediction has as many proposals as the longest that was seen."""
    rows = [
        [name, c.rounds, c.proposed, c.accepted, f"{c.share:.2f}", f"{c.acceptance:.2f}", f"{c.tokens_per_round:.2f}",
         f"{tokens_per_round(c.acceptance, len(c.tested)):.2f}"]
        for name, c in counts.items()
    ]
    return table(rows, ["draft", "rounds", "proposed", "accepted", "of proposed", "of tested", "tokens a round",
                        "1 + a + ... + a^k"])


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
