"""Packed batches of a fixed number of tokens, each a function of the seed and its own number.

Dialogues are laid one after the other until no more fit, so nothing is padded but the last few tokens, and attention
stays inside a dialogue. Because batch number i depends on nothing else, worker processes make them in any order, a run
that was stopped goes on at the batch where it stood, and no training token is ever seen twice on purpose. One dialogue
in ten begins at a random position of the model's 131,072: positions are relative in the scores, and rotary angles of
large positions are what fp32 makes of them, which the model should have met.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import DataLoader, Dataset

from gptoss_lab.harmony.ids import END_OF_TEXT
from gptoss_lab.train.dialogues import render_dialogue, training_dialogue
from gptoss_lab.train.dialogues.render import Rendered
from gptoss_lab.train.vocabulary import Vocabulary

SHIFTED_SHARE = 0.1
TRIES = 8
"""Dialogues tried for the rest of a batch before it is filled with padding."""


@dataclass(frozen=True)
class Batch:
    """rows, positions [T] int32; learned [T] bool, whether the token at t is to be predicted; offsets [B + 1]."""

    rows: np.ndarray
    positions: np.ndarray
    learned: np.ndarray
    offsets: list[int]

    def places(self, ahead: int = 1) -> np.ndarray:
        """[N] int64: every t whose token t + ahead is learned and belongs to the same dialogue."""
        dialogue = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        same = dialogue[:-ahead] == dialogue[ahead:]
        return np.flatnonzero(same & self.learned[ahead:])


def pack(dialogues: Sequence[Rendered], vocabulary: Vocabulary, positions: Sequence[int] | None = None) -> Batch:
    """Dialogues one after the other. positions: where each begins, default 0. Tokens of the shared row are not learned:
    an answer never has any, or `Vocabulary` was made of other dialogues.
    """
    rows = [vocabulary.compact(d.ids) for d in dialogues]
    starts = [0] * len(rows) if positions is None else positions
    learned = np.concatenate([np.array(d.learned, dtype=bool) for d in dialogues])
    flat = np.concatenate(rows)
    return Batch(
        flat, np.concatenate([np.arange(s, s + len(r), dtype=np.int32) for s, r in zip(starts, rows, strict=True)]),
        learned & (flat != vocabulary.shared), [0, *np.cumsum([len(r) for r in rows]).tolist()],
    )


def make_batch(
    number: int, seed: int, tokens: int, vocabulary: Vocabulary, furthest: int,
    draw: Callable[[random.Random], Rendered] | None = None,
) -> Batch:
    """Batch `number` of exactly `tokens` tokens. furthest: the model's last position. draw: default training dialogues.
    """
    rng = random.Random(f"{seed}/{number}")
    found, starts, left, misses = [], [], tokens, 0
    while left and misses < TRIES:
        dialogue = _training(rng) if draw is None else draw(rng)
        if len(dialogue.ids) > left:
            misses += 1
            continue
        found.append(dialogue)
        shifted = rng.random() < SHIFTED_SHARE
        starts.append(rng.randint(0, furthest - len(dialogue.ids)) if shifted else 0)
        left -= len(dialogue.ids)
    if left:
        found.append(Rendered([END_OF_TEXT] * left, [False] * left))
        starts.append(0)
    return pack(found, vocabulary, starts)


def _training(rng: random.Random) -> Rendered:
    return render_dialogue(training_dialogue(rng), rng)


class _Batches(Dataset):
    def __init__(self, seed: int, tokens: int, vocabulary: Vocabulary, furthest: int) -> None:
        self.arguments = seed, tokens, vocabulary, furthest

    def __getitem__(self, number: int) -> Batch:
        return make_batch(number, *self.arguments)

    def __len__(self) -> int:
        return 1 << 40


def stream(
    seed: int, tokens: int, vocabulary: Vocabulary, furthest: int, *, first: int = 0, workers: int = 0
) -> Iterator[Batch]:
    """Batches first, first + 1, ... without end. workers: processes that make them (0: this one)."""
    loader = DataLoader(
        _Batches(seed, tokens, vocabulary, furthest), batch_size=None, sampler=_Counting(first), num_workers=workers,
        collate_fn=_as_it_is, prefetch_factor=8 if workers else None,
    )
    return iter(loader)


class _Counting:
    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while True:
            yield number
            number += 1


def _as_it_is(batch: Batch) -> Batch:
    """Numpy arrays go through the pipe; torch tensors would take shared memory, of which containers have little."""
    return batch
