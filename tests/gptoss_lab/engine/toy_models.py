"""Models made of a table, and tiny random ones, for the tests of decoders and scheduler."""
from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path

import torch

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.model import Transformer, load_model

VOCAB = 11
CONFIG = dataclasses.replace(
    preset("nano"), vocab_size=VOCAB, max_position_embeddings=64, eos_token_ids=(10,), pad_token_id=0, num_layers=2,
    sliding_window=4, num_kv_heads=1, head_dim=2,
)


SMALL = dataclasses.replace(
    preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_experts=3, experts_per_token=2, num_heads=2,
    num_kv_heads=1, head_dim=32, vocab_size=23, sliding_window=7, eos_token_ids=(3,), pad_token_id=0,
)


class TableCache:
    """Remembers the tokens it was fed."""

    def __init__(self):
        self.seen = []

    @property
    def length(self):
        return len(self.seen)

    def truncate(self, length):
        assert 0 <= length <= self.length
        del self.seen[length:]


class Table:
    """logits of the next token = table[last token] (or of the last two), whatever came before. [V, V] or [V, V, V]."""

    device = torch.device("cpu")

    def __init__(self, table, config=CONFIG):
        self.table, self.config, self.calls = table, config, []

    def new_cache(self, capacity, draft=0):
        return TableCache()

    def __call__(self, token_ids, lengths, caches, *, logits):
        self.calls.append((list(lengths), logits))
        rows, ends = [], []
        for cache, new in zip(caches, token_ids.split(list(lengths)), strict=True):
            for token in new.tolist():
                cache.seen.append(token)
                last = self.table[token]
                if last.ndim == 2:
                    last = last[cache.seen[-2] if len(cache.seen) > 1 else 0]
                rows.append(last)
            ends.append(len(rows) - 1)
        if logits == "none":
            return None
        return torch.stack(rows if logits == "all" else [rows[end] for end in ends])


def random_table(seed, order=1, spread=1.5):
    """Seeded normal logits [V, V] or, of order 2, [V, V, V]; fp32."""
    g = torch.Generator().manual_seed(seed)
    return spread * torch.randn((VOCAB,) * (order + 1), generator=g)


def blended(table, seed, noise):
    """A worse model: the same logits with noise."""
    g = torch.Generator().manual_seed(seed)
    return table + noise * torch.randn(table.shape, generator=g)


def small_model(config: ModelConfig = SMALL, seed: int = 0) -> Transformer:
    """A real model with random weights in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small"
        synth(config, path, seed=seed)
        return copy.deepcopy(load_model(path, dtype=torch.float32))


@torch.no_grad()
def worse(model: Transformer, noise: float, seed: int = 0) -> Transformer:
    """A copy whose weights are off by so much of their own size."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        if weight.is_floating_point():
            weight += noise * weight.float().std(unbiased=False) * torch.randn(weight.shape, generator=g)
    return other


def drive(loop, prompts, params, arrival, cancelled):
    """Run a loop to its end: prompt i comes before step arrival[i], and is cancelled before step cancelled[i] if that
    names it. Returns the tokens of each, and who ended and who was cancelled in time. Nobody may speak after that."""
    got, ended, left, step = {i: [] for i in range(len(prompts))}, set(), set(), 0
    while step <= max([*arrival, *cancelled.values()]) or not loop.idle:
        for i in (i for i, when in enumerate(arrival) if when == step):
            loop.submit(i, prompts[i], params[i])
        for i in (i for i, when in cancelled.items() if when == step):
            if loop.cancel(i):
                left.add(i)
        for event in loop.step():
            assert event.sequence not in ended | left
            got[event.sequence].append(event.token)
            if event.finish is not None:
                ended.add(event.sequence)
        step += 1
    return got, ended, left
