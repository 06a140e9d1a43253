"""What a model does with held-out problems: what it answers, and how likely it finds the right answers.

Answers are written by the lab's engine, greedily, in batches with caches. Likelihoods, divergences and experts are read
off one pass over given dialogues, through the same caches, so that a variant of the cache counts there too. Only tokens
that the model has to write count (dialogues/render.py says which).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.model import Recorder
from gptoss_lab.train.dialogues.render import Rendered
from gptoss_lab.train.evaluate import Generate
from gptoss_lab.train.study.source import Rows

CHUNK_LOGITS = 1 << 23
"""Logits of one pass, at most, unless one dialogue alone has more."""
KEPT_BYTES = 2 << 30
"""Of the baseline's log-probabilities, for divergences."""


@dataclass
class Reading:
    """One pass over dialogues, an entry for each: losses, summed, in nats; counts, tokens that count; divergences,
    KL(baseline || this) summed over them, of as many dialogues as the baseline kept.

    experts: [L, T, k] int16, ascending, of all tokens. log_probabilities: what a baseline keeps, [tokens, rows].
    """

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    experts: torch.Tensor | None = None
    log_probabilities: list[torch.Tensor] = field(default_factory=list)

    def experts_unchanged(self, other: Reading) -> tuple[int, int]:
        """(token and layer pairs whose set of experts is the same, all pairs)."""
        same = (self.experts == other.experts).all(dim=-1)
        return int(same.sum()), same.numel()


@torch.inference_mode()
def read(
    model: Any, dialogues: Sequence[Rendered], rows: Rows, batch: int, baseline: Reading | None = None
) -> Reading:
    """Pass the dialogues through a model. batch: dialogues in one pass, at most. baseline: its reading of the same
    dialogues; None makes one.
    """
    reading, experts, kept = Reading(), [], 0
    offset = rows.offset().to(model.device)
    for chunk in _chunks(dialogues, batch, max(1, CHUNK_LOGITS // rows.count)):
        seen = Recorder("router_ids")
        ids = [rows.compact(d.ids) for d in chunk]
        flat = torch.tensor([row for one in ids for row in one], device=model.device)
        caches = [model.new_cache(len(one)) for one in ids]
        logits = model(flat, [len(one) for one in ids], caches, logits="all", observe=seen)
        experts.append(seen.stacked("router_ids").sort(dim=-1).values.short())
        start = 0
        for dialogue, own in zip(chunk, ids, strict=True):
            at = torch.tensor([t for t in range(len(own) - 1) if dialogue.learned[t + 1]], device=model.device)
            log_p = torch.log_softmax(logits[start + at].float() + offset, dim=-1)                # [tokens, rows]
            start += len(own)
            target = flat.new_tensor(own)[at + 1]
            reading.losses.append(float(-log_p.gather(1, target[:, None]).sum(dtype=torch.float64)))
            reading.counts.append(len(at))
            number = len(reading.losses) - 1
            if baseline is None:
                kept += log_p.nbytes
                if kept <= KEPT_BYTES:
                    reading.log_probabilities.append(log_p.cpu())
            elif number < len(baseline.log_probabilities):
                reading.divergences.append(_divergence(baseline.log_probabilities[number].to(log_p.device), log_p))
    reading.experts = torch.cat(experts, dim=1)
    return reading


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Sum over tokens of KL(p || q), from log-probabilities [tokens, rows]. A row that stands for many equal ids has
    the probability of all of them in both, so nothing is missing.
    """
    return float((p.double().exp() * (p.double() - q.double())).sum())


def _chunks(dialogues: Sequence[Rendered], most: int, tokens: int) -> Iterator[list[Rendered]]:
    """Dialogues in their order, at most `most` and `tokens` tokens together, at least one."""
    chunk: list[Rendered] = []
    for dialogue in dialogues:
        if len(chunk) == most or (chunk and sum(len(d.ids) for d in chunk) + len(dialogue.ids) > tokens):
            yield chunk
            chunk = []
        chunk.append(dialogue)
    if chunk:
        yield chunk


def writer(model: Any, rows: Rows, limit: int, batch: int) -> Generate:
    """Prompts as token ids -> greedy continuations as token ids, their stop included, by the lab's engine.

    limit: new tokens at most. batch: prompts answered together, of like length.
    """
    engine, params = Engine(model), SamplingParams(temperature=0, max_new_tokens=limit)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            done = engine.complete([rows.compact(prompts[i]) for i in some], params)
            for i, completion in zip(some, done, strict=True):
                answers[i] = rows.full(completion.tokens)
        return answers

    return generate
