"""A checkpoint as the study reads it: equal vocabulary rows once, for some variants other constants or no sinks.

The trained nano has 201,088 vocabulary rows of which all but some 1,700 are one row, repeated. Its logit is then also
one, repeated, so the model is computed on one of them: its logit counts with + log(their number) in a softmax, once in
an argmax. No value changes, and the largest product of the model becomes a hundred times smaller. A checkpoint whose
rows all differ is read as it is.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gptoss_lab.checkpoint.compact import VOCABULARY_TENSORS
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.load import Source

_ROWS = 1 << 14         # compared at a time


@dataclass(frozen=True)
class Rows:
    """Which rows are computed. kept: token ids of rows of their own, ascending. size: of the vocabulary. The other ids,
    if there are any, share one row more, the last.
    """

    kept: tuple[int, ...]
    size: int

    @property
    def others(self) -> int:
        """How many ids share the last row; 0 if every id has its own."""
        return self.size - len(self.kept)

    @property
    def count(self) -> int:
        """Rows in all."""
        return len(self.kept) + (self.others > 0)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """A token id of every row; the lowest of those that share one, which an argmax would give."""
        shared = [next(i for i in range(self.size) if i not in self._row)] if self.others else []
        return (*self.kept, *shared)

    @cached_property
    def _row(self) -> dict[int, int]:
        return {token: number for number, token in enumerate(self.kept)}

    def offset(self) -> torch.Tensor:
        """[count] fp32, to be added to logits before a softmax: log of the number of ids of each row."""
        offset = torch.zeros(self.count)
        if self.others:
            offset[-1] = math.log(self.others)
        return offset

    def compact(self, ids: Iterable[int]) -> list[int]:
        """Token ids -> rows."""
        return [self._row.get(token, len(self.kept)) for token in ids]

    def full(self, rows: Iterable[int]) -> list[int]:
        """Rows -> token ids."""
        return [self.tokens[row] for row in rows]

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config on these rows."""
        pad = self.compact([config.pad_token_id])[0]
        return replace(config, vocab_size=self.count, pad_token_id=pad,
                       eos_token_ids=tuple(self.compact(config.eos_token_ids)))


def find_rows(source: Source) -> Rows:
    """The rows of a source: those that are the last id's row, in embedding and unembedding alike, become one."""
    size = source.config.vocab_size
    own = torch.zeros(size, dtype=torch.bool)
    for name in VOCABULARY_TENSORS:
        table = source.tensor(name)
        for start in range(0, size, _ROWS):
            piece = slice(start, min(size, start + _ROWS))
            own[piece] |= (table[piece] != table[-1]).any(dim=1)
    kept = torch.nonzero(own).flatten().tolist()
    return Rows(tuple(kept if len(kept) < size - 1 else range(size)), size)


class StudySource:
    """A `Source` with the vocabulary rows of `rows` and another config. sinks: False gives -inf, which is no sink."""

    def __init__(self, source: Source, rows: Rows, config: ModelConfig, sinks: bool = True) -> None:
        self._source, self._sinks = source, sinks
        self._tokens = torch.tensor(rows.tokens) if rows.others else None
        self.config = rows.config(config)

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """See `Source`."""
        tensor = self._source.tensor(name, device)
        if name in VOCABULARY_TENSORS and self._tokens is not None:
            return tensor[self._tokens.to(tensor.device)]
        if name.endswith(".self_attn.sinks") and not self._sinks:
            return torch.full_like(tensor, -torch.inf)
        return tensor

    def linear(self, name: str, device: torch.device | None = None):
        """See `Source`."""
        return self._source.linear(name, device)

    def experts(self, layer: int, projection: str, *, device: torch.device | None = None):
        """See `Source`."""
        return self._source.experts(layer, projection, device=device)

