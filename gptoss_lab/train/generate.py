"""Greedy generation in batches with the model that is being trained, for evaluation between and after phases.

The same forward as in training; only `attend` differs: in prefill it also keeps keys and values, in decode it looks
them up, padded to one length. A whole evaluation set takes a few hundred passes. Not an engine: no scheduling, no
sampling, no vocabulary beyond the compact one.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_lab.train.attention import packed
from gptoss_lab.train.model import TrainedModel

CACHE_TOKENS = 400_000
"""Sequences times padded length of one batch."""


@torch.no_grad()
def greedy(
    model: TrainedModel, prompts: Sequence[Sequence[int]], stops: frozenset[int], limit: int, form: str = "reference"
) -> list[list[int]]:
    """The likeliest continuation of each prompt, in rows of the compact vocabulary, its stop included.

    prompts: rows. stops: rows that end a sequence. limit: new tokens at most. form: of the attention in prefill.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in _batches([len(p) for p in prompts], limit):
        found = _one_batch(model, [prompts[i] for i in batch], stops, limit, form)
        for index, answer in zip(batch, found, strict=True):
            answers[index] = answer
    return answers


def _batches(lengths: list[int], limit: int) -> list[list[int]]:
    """Indices of prompts of like length, so many that the caches hold at most CACHE_TOKENS."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * (lengths[index] + limit) <= CACHE_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _one_batch(
    model: TrainedModel, prompts: list[Sequence[int]], stops: frozenset[int], limit: int, form: str
) -> list[list[int]]:
    device = model.embedding.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    cache = _Cache(model, prompts, int(lengths.max()) + limit, form)
    flat = torch.tensor([row for p in prompts for row in p], device=device)
    hidden, _ = model(flat, cache.positions, cache.prefill)
    hidden = hidden[lengths.cumsum(0) - 1]
    stop = torch.tensor(sorted(stops), device=device)
    found, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for count in range(1, limit + 1):
        new = model.logits(hidden)[:, :-1].argmax(dim=-1)             # the shared row is no token
        found.append(new)
        ended |= torch.isin(new, stop)
        if count == limit or (count % 8 == 0 and bool(ended.all())):
            break
        hidden, _ = model(new, cache.lengths, cache.decode)
        cache.lengths += 1
    return [_until(row, stops) for row in torch.stack(found, dim=1).tolist()]


def _until(rows: list[int], stops: frozenset[int]) -> list[int]:
    end = next((i for i, row in enumerate(rows) if row in stops), len(rows) - 1)
    return rows[: end + 1]


class _Cache:
    """Keys and values [layers, B, S, Hkv, D] of B sequences, and both forms of attention on them."""

    def __init__(self, model: TrainedModel, prompts: list[Sequence[int]], size: int, form: str) -> None:
        c, device = model.config, model.embedding.device
        counts = [len(p) for p in prompts]
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        self.lengths = torch.tensor(counts, device=device)
        self.sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), self.lengths)
        self.positions = torch.cat([torch.arange(n, device=device) for n in counts])
        shape = (c.num_layers, len(counts), size, c.num_kv_heads, c.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._packed = packed(form, offsets, device)

    def prefill(self, layer, q, k, v, sinks, window):
        """Attention of all prompts, packed; keeps keys and values."""
        self.keys[layer, self.sequence, self.positions] = k
        self.values[layer, self.sequence, self.positions] = v
        return self._packed(layer, q, k, v, sinks, window)

    def decode(self, layer, q, k, v, sinks, window):
        """Attention of one new token of each sequence. q: [B, Hq, D]."""
        each = torch.arange(len(q), device=q.device)
        self.keys[layer, each, self.lengths], self.values[layer, each, self.lengths] = k, v
        heads = q.float().unflatten(1, (k.shape[1], -1))                              # [B, Hkv, R, D]
        scores = torch.einsum("bgrd,bsgd->bgrs", heads, self.keys[layer].float()) * q.shape[-1] ** -0.5
        at = torch.arange(scores.shape[-1], device=q.device)[None]
        hidden = at > self.lengths[:, None]
        if window is not None:
            hidden = hidden | (at <= self.lengths[:, None] - window)
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        sink = sinks.float().view(1, k.shape[1], -1, 1).expand(len(q), -1, -1, 1)
        share = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("bgrs,bsgd->bgrd", share, self.values[layer].float()).flatten(1, 2).to(q.dtype)
