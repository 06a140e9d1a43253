"""Who drafts in the lessons, and for which questions.

The nano checkpoint has a draft model and prediction heads that were trained for it. For any other checkpoint a draft is
made by spoiling the model itself (its layers' weights are moved by a share of their own size), and heads are drawn at
random: the machinery is the same, and what stands is then no finding about a real draft.

A draft learns the same dialogues as its model, so on what both know well nearly everything stands. `ASKED` has one such
set of questions and two outside of nano's training: larger numbers, and words without the quotes that they always had
there. After a space a word is another token, one of those that all look alike to nano, so model and draft both guess.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch

from gptoss_lab.bench.speculation_drafts import spoiled
from gptoss_lab.checkpoint.compact import read_compact
from gptoss_lab.checkpoint.nano import ensure_nano_draft, trained_beside, trained_nano
from gptoss_lab.engine.decoders.mtp import Head, load_heads
from gptoss_lab.harmony import render, system, user
from gptoss_lab.model import Transformer, load_model

NOISE = 0.05
"""Of a draft that is a spoiled copy."""
DATE = "2025-06-28"
WORDS = ("melon", "river", "window", "garden", "silver", "market")
ASKED = {
    "sums as in its training": tuple(f"What is {37 + 5 * n} + {48 + 3 * n}?" for n in range(6)),
    "sums of larger numbers": tuple(f"What is {3700 + 531 * n} + {48888 + 3377 * n}?" for n in range(6)),
    "words that it cannot read": tuple(f"Spell {word} backwards." for word in WORDS),
}
"""Name -> questions."""


def prompts(questions: Iterable[str], effort: str = "high") -> list[list[int]]:
    """Each question as a chat's ids, up to where the answer begins."""
    return [render([system(effort, DATE), user(question)]) for question in questions]


def is_trained_nano(model: Transformer) -> bool:
    """Whether a model has the config and the final norm of the shipped nano: a name or a shape is also that of a nano
    with other weights, and heads read the states behind that norm."""
    compact = trained_nano()
    if compact is None or model.config.name != "nano":
        return False
    config, _, tensors = read_compact(compact)
    norm = tensors["model.norm.weight"]
    return model.config == config and torch.equal(model.norm.weight.detach().to("cpu", norm.dtype), norm)


def draft_for(model: Transformer) -> tuple[Transformer, str]:
    """A draft for a model, and what it is: nano's own, or a spoiled copy."""
    folder = ensure_nano_draft() if is_trained_nano(model) else None
    if folder is None:
        return spoiled(model, NOISE), f"a copy with noise {NOISE:g}"
    return load_model(folder, model.device, model.dtype), "trained for the nano checkpoint"


def heads_for(model: Transformer, count: int = 2) -> tuple[list[Head], str]:
    """Heads for a model, and what they are: those trained for the nano checkpoint, or `count` random ones."""
    file = trained_beside("mtp.safetensors") if is_trained_nano(model) else None
    if file is not None:
        return load_heads(file, model), "trained for the nano checkpoint"
    g, h = torch.Generator().manual_seed(0), model.config.hidden_size
    shapes = ((h, 2 * h, (2 * h) ** -0.5), (h, h, h**-0.5))
    drawn = [[std * torch.randn(rows, columns, generator=g) for rows, columns, std in shapes] for _ in range(count)]
    return [Head(*(w.to(model.device, model.dtype) for w in (*pair, torch.ones(h)))) for pair in drawn], "random"
