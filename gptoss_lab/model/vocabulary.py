"""The embedding of the vocabulary rows that are on this rank."""
from __future__ import annotations

import torch
from torch import nn


class VocabularyEmbedding(nn.Module):
    """Rows `rows.start` .. `rows.stop - 1` of an embedding of `size` rows. weight: [len(rows), H]."""

    def __init__(self, rows: range, size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self.size = rows, size
        self.weight = nn.Parameter(torch.empty(len(rows), hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] int64 -> [T, H]; zeros for ids whose rows are on other ranks."""
        if len(self.rows) == self.size:
            return nn.functional.embedding(token_ids, self.weight)
        local = token_ids - self.rows.start
        here = (local >= 0) & (local < len(self.rows))
        found = nn.functional.embedding(local.clamp(0, len(self.rows) - 1), self.weight)
        return torch.where(here[:, None], found, 0)

    def extra_repr(self) -> str:
        return f"rows {self.rows.start}..{self.rows.stop - 1} of {self.size}, hidden {self.weight.shape[1]}"
