"""Keys and values of one sequence: full layers keep all of them, sliding layers only what their window still reaches.

A cache belongs to one sequence, so a ragged batch is a list of caches, and a sequence joins or leaves a batch without
touching the others. Keys are stored already turned by their position. A layer's `extend` returns the rows that the new
queries attend to; `Transformer` calls `commit` after the last layer, so a step that raised half-way changed nothing.

A full layer's buffer grows by doubling. A sliding layer of window W returns its W - 1 old rows followed by the new
ones and afterwards keeps the last W - 1: the oldest key that the next token can see is W - 1 positions back. With a
draft it keeps so many rows more, and `truncate` may take back so many tokens.
What is lost: bounded memory for the full layers, which a paged cache has (paged.py).
"""
from __future__ import annotations

import torch

from gptoss_lab.config import ModelConfig


class FullLayer:
    """All keys and values of one full-attention layer. Buffers: [capacity, Hkv, D]."""

    def __init__(self, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.empty(capacity, kv_heads, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._length = self._pending = 0

    @property
    def keys(self) -> torch.Tensor:
        """[length, Hkv, D], rotated."""
        return self._keys[: self._length]

    @property
    def values(self) -> torch.Tensor:
        """[length, Hkv, D]."""
        return self._values[: self._length]

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows [C, Hkv, D] -> all rows [length + C, Hkv, D], views into the buffers."""
        end = self._length + keys.shape[0]
        if end > self._keys.shape[0]:
            self._grow(max(end, 2 * self._keys.shape[0]))
        self._keys[self._length : end] = keys
        self._values[self._length : end] = values
        self._pending = end
        return self._keys[:end], self._values[:end]

    def commit(self) -> None:
        """Keep the rows of the last `extend`."""
        self._length = self._pending

    def truncate(self, dropped: int) -> None:
        """Forget the last `dropped` rows."""
        self._length = self._pending = self._length - dropped

    def _grow(self, capacity: int) -> None:
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty(capacity, *old.shape[1:])
            new[: self._length] = old[: self._length]
            setattr(self, name, new)


class SlidingLayer:
    """The last window - 1 + draft keys and values of one sliding layer: [at most window - 1 + draft, Hkv, D]."""

    def __init__(
        self, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device, draft: int = 0
    ) -> None:
        self.keys = torch.empty(0, kv_heads, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self._window, self._draft = window, draft
        self._pending = (self.keys, self.values)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New rows [C, Hkv, D] -> the window before them and they, [at most window - 1 + C, Hkv, D]."""
        self._pending = torch.cat([self.keys, keys]), torch.cat([self.values, values])
        first = max(0, self.keys.shape[0] - (self._window - 1))
        return self._pending[0][first:], self._pending[1][first:]

    def commit(self) -> None:
        """Keep the last window - 1 + draft rows of the last `extend`."""
        self.keys, self.values = (self._tail(rows) for rows in self._pending)
        self._pending = (self.keys, self.values)

    def truncate(self, dropped: int) -> None:
        """Forget the last `dropped` rows."""
        kept = self.keys.shape[0] - dropped
        self.keys, self.values = self.keys[:kept], self.values[:kept]
        self._pending = (self.keys, self.values)

    def _tail(self, rows: torch.Tensor) -> torch.Tensor:
        most = self._window - 1 + self._draft
        kept = rows[max(0, rows.shape[0] - most) :]
        # A view would hold on to a whole prefill chunk; one step of decode is one row more than needed.
        return kept if rows.shape[0] <= most + 1 else kept.clone()


class SequenceCache:
    """Keys and values of one sequence in all layers.

    config: shapes. kv_heads: those of this rank (default: all). capacity: tokens the full layers have room for before
    they grow. draft: tokens that `truncate` may take back once a sliding layer holds its whole window. length: tokens
    seen so far, which is the position of the next one.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = 256,
        kv_heads: int | None = None,
        draft: int = 0,
    ) -> None:
        shape = (config.num_kv_heads if kv_heads is None else kv_heads, config.head_dim)
        where = torch.device(device)
        self.layers = [
            SlidingLayer(*shape, config.sliding_window, dtype, where, draft) if config.is_sliding(n)
            else FullLayer(*shape, capacity, dtype, where)
            for n in range(config.num_layers)
        ]
        self.length = 0
        self._window, self._draft, self._oldest = config.sliding_window, draft, 0

    def commit(self, tokens: int) -> None:
        """Keep what every layer was extended by in this step: `tokens` new positions."""
        for layer in self.layers:
            layer.commit()
        self.length += tokens
        self._oldest = max(self._oldest, self.length - (self._window - 1 + self._draft))

    def truncate(self, length: int) -> None:
        """Take back the positions from `length` on.

        ValueError if a sliding layer no longer holds the window before `length`: after a long sequence, that is for
        more than `draft` positions in all since the last time it grew.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens cannot be cut to {length}")
        if max(0, length - self._window + 1) < self._oldest:
            raise ValueError(f"a sequence of {self.length} tokens cannot be cut to {length}: its sliding layers keep "
                             f"{self._draft} positions more than the window")
        for layer in self.layers:
            layer.truncate(self.length - length)
        self.length = length

    @property
    def bytes(self) -> int:
        """Bytes of the stored rows (a full layer's spare capacity not counted)."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
