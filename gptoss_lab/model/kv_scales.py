"""Scales for keys and values in e4m3: the largest magnitude that a few prompts show, per layer and key/value head.

e4m3 is a floating format, so a scale does not sharpen it: a value is off by up to 1/16 of itself anywhere in its
normal range. The scale sets where that range lies. With the largest magnitude of a head at 448, values down to 1/28672
of it keep their three bits, and nothing is cut; per head, because heads differ in size. It is fixed before serving, so
a row is rounded the same way whoever shares its page. What is lost: a later row beyond the largest one measured is cut
there; `margin` leaves room, at the price of as much at the small end.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptoss_kernels.reference.quant import E4M3_MAX
from gptoss_lab.model.cache import SequenceCache


def measured_scales(
    run: Callable[[torch.Tensor, SequenceCache], object],
    new_cache: Callable[[], SequenceCache],
    prompts: Sequence[torch.Tensor],
    margin: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(key_scales, value_scales), each [L, Hkv] fp32, for a `PagePool` of kv_form "fp8".

    run: one forward pass of token ids [T] that extends a cache, such as lambda ids, cache: model(ids, caches=[cache]).
    new_cache: makes it. prompts: token ids, at least one prompt. margin: at least 1; scale = margin * largest / 448,
    and 1 for a head that shows only zeros. ValueError for no prompt or a smaller margin.
    """
    if not prompts:
        raise ValueError("there are 0 prompts; at least 1 is needed to measure scales")
    if margin < 1:
        raise ValueError(f"margin is {margin}; at least 1 is expected")
    largest: list[list[torch.Tensor]] = []
    for ids in prompts:
        cache = new_cache()
        watched = [_Watched(layer) for layer in cache.layers]
        cache.layers = watched
        run(ids, cache)
        largest.append([layer.largest for layer in watched])
    amax = torch.stack([torch.stack(layers) for layers in largest]).amax(dim=0)          # [L, 2, Hkv]
    scales = torch.where(amax > 0, margin * amax / E4M3_MAX, torch.ones_like(amax))
    return scales[:, 0], scales[:, 1]


class _Watched:
    """A layer of a cache that notes the largest magnitude of each head among the rows that come in."""

    def __init__(self, layer: object) -> None:
        self._layer = layer
        self.largest: torch.Tensor | None = None                                        # [2, Hkv] keys, values

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.stack([rows.abs().amax(dim=(0, 2)).float() for rows in (keys, values)])
        self.largest = seen if self.largest is None else torch.maximum(self.largest, seen)
        return self._layer.extend(keys, values)

    def commit(self) -> None:
        self._layer.commit()
