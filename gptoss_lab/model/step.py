"""What all layers of one step share: where each sequence's new tokens lie, their angles, their caches.

`SplitStep` is the same where this rank computes only some of the tokens: its queries are the segments that it was
given, and keys and values of the others arrive from the ranks that computed them, as far as a layer can see them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gptoss_lab.model.cache import SequenceCache
from gptoss_lab.model.observe import Observe
from gptoss_lab.parallel.sequence import SequenceSplit


@dataclass(frozen=True)
class Step:
    """One forward pass over a ragged batch of B sequences with T new tokens.

    offsets: [B + 1] ints, sequence b's new tokens are rows offsets[b] .. offsets[b + 1]. cos, sin: [T, D / 2] fp32.
    caches: B of them, or None for a single pass that keeps nothing. observe: see observe.py.
    """

    offsets: tuple[int, ...]
    cos: torch.Tensor
    sin: torch.Tensor
    caches: Sequence[SequenceCache] | None
    observe: Observe | None

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """New keys and values [T, Hkv, D] -> those the new tokens attend to [Tk, Hkv, D], and their offsets [B + 1].

        One sequence alone gets a view of its cache; several are copied one after the other.
        """
        if self.caches is None:
            return keys, values, self.offsets
        pairs = [
            cache.layers[layer].extend(keys[a:b], values[a:b])
            for cache, a, b in zip(self.caches, self.offsets[:-1], self.offsets[1:], strict=True)
        ]
        if len(pairs) == 1:
            return *pairs[0], (0, pairs[0][0].shape[0])
        offsets = tuple(accumulate((k.shape[0] for k, _ in pairs), initial=0))
        return torch.cat([keys[:0], *(k for k, _ in pairs)]), torch.cat([values[:0], *(v for _, v in pairs)]), offsets


@dataclass(frozen=True)
class SplitStep(Step):
    """A step of which this rank computes the segments of `split`; each is a sequence of its own to the attention.

    offsets: [segments + 1], over this rank's rows. windows: of each layer, None where it is full.
    """

    split: SequenceSplit
    windows: tuple[int | None, ...]

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """As `Step.extend`, for own rows [own, Hkv, D]; the caches are extended by all new rows that they keep."""
        window, split = self.windows[layer], self.split
        moved = split.move(torch.cat([keys, values], dim=1), window, "keys and values")      # [T, 2 Hkv, D]
        seen = []
        for b, (start, stop) in enumerate(zip(split.offsets[:-1], split.offsets[1:], strict=True)):
            new = moved[start:stop].chunk(2, dim=1)
            seen.append(new if self.caches is None else self.caches[b].layers[layer].extend(*new))
        pairs = []
        for segment in split.own:
            k, v = seen[segment.sequence]
            before = k.shape[0] - split.lengths[segment.sequence]                            # cached rows
            low = 0 if window is None else max(0, before + segment.start - window + 1)
            pairs.append((k[low : before + segment.stop], v[low : before + segment.stop]))
        offsets = tuple(accumulate((k.shape[0] for k, _ in pairs), initial=0))
        return torch.cat([keys[:0], *(k for k, _ in pairs)]), torch.cat([values[:0], *(v for _, v in pairs)]), offsets


def positions_of(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> torch.Tensor:
    """[T] int64: positions of the new tokens; sequence b has lengths[b] of them, from starts[b] on."""
    parts = [torch.arange(start, start + n) for n, start in zip(lengths, starts, strict=True)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)


def check_new_tokens(
    token_ids: torch.Tensor, lengths: Sequence[int], caches: Sequence[object] | None, logits: str, most: int,
    may_idle: bool,
) -> list[int]:
    """What every forward pass refuses (see `Transformer.forward`), as ValueError; else the tokens that each sequence
    has already, B counts.

    most: the model's length. may_idle: no token at all is allowed (other ranks have some, and this rank experts for
    them).
    """
    if logits not in ("last", "all", "none"):
        raise ValueError(f"logits is {logits!r}; 'last', 'all' or 'none'")
    if token_ids.ndim != 1:
        raise ValueError(f"token_ids has shape {list(token_ids.shape)}; one flat row of all new tokens is expected")
    starts = [0] * len(lengths) if caches is None else [cache.length for cache in caches]
    if len(lengths) != len(starts):
        raise ValueError(f"{len(lengths)} lengths but {len(starts)} caches; each sequence has one of both")
    if len(set(map(id, caches or ()))) < len(caches or ()):
        raise ValueError("the same cache stands twice in caches; each sequence has its own")
    if not lengths and not token_ids.shape[0] and may_idle:
        return starts
    if sum(lengths) != token_ids.shape[0] or not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are {list(lengths)}; each must be at least 1 and all together "
                         f"{token_ids.shape[0]}, the number of token ids")
    longest = max(start + n for start, n in zip(starts, lengths, strict=True))
    if longest > most:
        raise ValueError(f"a sequence would have {longest} tokens; the model's length is {most}")
    return starts
