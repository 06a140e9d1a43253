"""What a finished run measures of its three models, on held-out dialogues, whose weights are in stored form already."""
from __future__ import annotations

import random

import torch

from gptoss_kernels.reference.attention import sink_attention
from gptoss_lab.train.batches import Batch, pack
from gptoss_lab.train.dialogues import Dialogue, render_dialogue
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.mtp import PredictionHeads, heads_loss
from gptoss_lab.train.trainees import on_device
from gptoss_lab.train.vocabulary import Vocabulary


def packed_dialogues(dialogues: list[Dialogue], vocabulary: Vocabulary, tokens: int) -> list[Batch]:
    """All dialogues in batches of about `tokens` tokens."""
    rng, groups, size = random.Random(0), [[]], 0
    for dialogue in dialogues:
        rendered = render_dialogue(dialogue, rng)
        if groups[-1] and size + len(rendered.ids) > tokens:
            groups.append([])
            size = 0
        groups[-1].append(rendered)
        size += len(rendered.ids)
    return [pack(group, vocabulary) for group in groups if group]


@torch.no_grad()
def heads_accuracy(heads: PredictionHeads, model: TrainedModel, batches: list[Batch], form: str) -> list[float]:
    """For each head, the share of learned tokens that it predicts, the tokens before given."""
    right, count = [0.0] * len(heads.heads), [0] * len(heads.heads)
    for batch in batches:
        rows, positions, attend = on_device(model, batch, form)
        hidden, _ = model(rows, positions, attend)
        places = [torch.from_numpy(batch.places(2 + j)).to(rows.device) for j in range(len(heads.heads))]
        _, found = heads_loss(heads, model, hidden, rows, places)
        for j, share in enumerate(found.tolist()):
            right[j] += share * len(places[j])
            count[j] += len(places[j])
    return [r / n for r, n in zip(right, count, strict=True)]


@torch.no_grad()
def draft_agreement(model: TrainedModel, draft: TrainedModel, batches: list[Batch], form: str) -> float:
    """Share of learned places where both models find the same token likeliest."""
    same = count = 0
    for batch in batches:
        rows, positions, attend = on_device(model, batch, form)
        at = torch.from_numpy(batch.places()).to(rows.device)
        choices = [m.likeliest(m.logits(m(rows, positions, attend)[0][at])) for m in (model, draft)]
        same += int((choices[0] == choices[1]).sum())
        count += len(at)
    return same / count


@torch.no_grad()
def attention_scores(model: TrainedModel, batch: Batch) -> dict[str, list[float]]:
    """For each layer, over all tokens and heads: sink_share, the mean share of the softmax that the sink has, and
    largest, of the logarithm of the softmax's denominator. Scores in the hundreds are more than bf16 can tell apart.
    """
    found: dict[str, list[float]] = {"sink_share": [], "largest": []}

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out, lse = sink_attention(q, k, v, sinks, cu_seqlens_q=batch.offsets, cu_seqlens_k=batch.offsets, window=window)
        found["sink_share"].append(float(torch.exp(sinks - lse).mean()))
        found["largest"].append(float(lse.max()))
        return out

    rows, positions, _ = on_device(model, batch, "reference")
    model(rows, positions, attend)
    return found


@torch.no_grad()
def busiest_expert(model: TrainedModel, batch: Batch, form: str) -> float:
    """Mean over layers of the largest share of rows that one expert gets, times the number of experts; 1 is even."""
    seen: list[torch.Tensor] = []
    rows, positions, attend = on_device(model, batch, form)
    model(rows, positions, attend, observe=seen.append)
    experts = model.config.num_experts
    shares = [torch.bincount(ids.flatten(), minlength=experts).float() / ids.numel() for ids in seen]
    return float(torch.stack([s.max() for s in shares]).mean() * experts)
