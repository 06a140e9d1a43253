"""The part of the vocabulary that training uses, and one row that stands for all the rest.

Of 201,088 tokens the dialogues use about 1,700. Only these have rows of their own; every other token shares one row in
the embedding and one in the unembedding. In the softmax that one row stands for many equal logits, so its logit enters
with + log(their number): the loss is then exactly that of the full vocabulary, in which the shared row is repeated
198,000 times, and training pushes it down by as much as all of them together cost. Row numbers here: the kept tokens in
ascending id, then the shared row.
"""
from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from gptoss_lab.harmony import VOCABULARY_SIZE, encode
from gptoss_lab.harmony.ids import END_OF_TEXT
from gptoss_lab.train.dialogues.compose import training_dialogue
from gptoss_lab.train.dialogues.render import render_dialogue
from gptoss_lab.train.dialogues.talk import OUTSIDE
from gptoss_lab.train.dialogues.tools import CITIES, SKIES
from gptoss_lab.train.dialogues.words import LETTERS, WORDS

SAMPLE = 10_000
"""Dialogues whose tokens are collected; what none of them shows is not worth a row."""


class Vocabulary:
    """token_ids: the kept ids, ascending, as int32. shared: number of the shared row, which is how many are kept."""

    def __init__(self, token_ids: Iterable[int], size: int = VOCABULARY_SIZE) -> None:
        self.token_ids = np.array(sorted(set(token_ids)), dtype=np.int32)
        self.size, self.shared = size, len(self.token_ids)
        if not 0 < self.shared < size or self.token_ids[0] < 0 or self.token_ids[-1] >= size:
            raise ValueError(f"{self.shared} ids of a vocabulary of {size}; some, not all, each in 0..{size - 1}")
        self._row = np.full(size, self.shared, dtype=np.int32)
        self._row[self.token_ids] = np.arange(self.shared, dtype=np.int32)

    @property
    def rows(self) -> int:
        """Rows of the compact embedding: the kept ones and the shared one."""
        return self.shared + 1

    @property
    def others(self) -> int:
        """How many tokens the shared row stands for."""
        return self.size - self.shared

    def compact(self, ids: Iterable[int]) -> np.ndarray:
        """Token ids -> row numbers, int32."""
        return self._row[np.asarray(ids, dtype=np.int64)]

    def full(self, rows: Iterable[int]) -> list[int]:
        """Row numbers -> token ids. ValueError for the shared row, which is no token."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and rows.max() >= self.shared:
            raise ValueError(f"row {rows.max()} is the shared one; rows of tokens are 0..{self.shared - 1}")
        return self.token_ids[rows].tolist()


def training_vocabulary(sample: int = SAMPLE) -> Vocabulary:
    """The tokens of `sample` dialogues, all numbers of up to three digits, all listed words. Always the same."""
    ids = {END_OF_TEXT}
    for text in (*LETTERS, *WORDS, *CITIES, *SKIES):
        ids.update(encode(f" {text}"), encode(text), encode(f'"{text}"'))
    ids.update(encode(OUTSIDE))
    for width in (1, 2, 3):
        ids.update(i for n in range(10**width) for i in encode(f"{n:0{width}d}"))
    rng = random.Random("vocabulary")
    for _ in range(sample):
        dialogue = training_dialogue(rng)
        if all(turn.task != "outside" for turn in dialogue.turns):
            ids.update(render_dialogue(dialogue, rng).ids)
    return Vocabulary(ids)
