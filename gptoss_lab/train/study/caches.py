"""Keys and values through e4m3 on their way into the cache, one scale per layer and key/value head.

The scales are those of the paged FP8 cache, measured on a few prompts that no problem uses. What is attended to are the
rounded rows, a token's own among them, as where a kernel reads the cache. They are kept in the cache's own dtype: bf16
rounds a scaled e4m3 value once more, by at most 1/16 of what e4m3 did.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gptoss_kernels.reference.quant import E4M3_MAX
from gptoss_lab.model.kv_scales import measured_scales
from gptoss_lab.model.transformer import Transformer


class Fp8CacheModel:
    """A model, to the engine, whose caches round what enters them. prompts: row numbers, to measure scales on."""

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        self.config, self.device, self.dtype, self._model = model.config, model.device, model.dtype, model
        tokens = [torch.tensor(p, device=model.device) for p in prompts]
        with torch.inference_mode():
            self.scales = measured_scales(
                lambda ids, cache: model(ids, caches=[cache], logits="none"), model.new_cache, tokens)

    def new_cache(self, capacity: int = 256) -> Any:
        """As the model's, with layers that round."""
        cache = self._model.new_cache(capacity)
        cache.layers = [_Rounded(layer, *pair) for layer, *pair in zip(cache.layers, *self.scales, strict=True)]
        return cache

    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor | None:
        """As the model."""
        return self._model(*arguments, **options)


class _Rounded:
    """A layer of a cache. key_scale, value_scale: [Hkv] fp32."""

    def __init__(self, layer: Any, key_scale: torch.Tensor, value_scale: torch.Tensor) -> None:
        self._layer, self._key_scale, self._value_scale = layer, key_scale, value_scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the layer's, on rounded rows [C, Hkv, D]."""
        return self._layer.extend(rounded(keys, self._key_scale), rounded(values, self._value_scale))


def rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """rows [C, Hkv, D] through e4m3 with scale [Hkv], in their own dtype."""
    wide = scale.to(rows.device)[:, None]
    codes = (rows.float() / wide).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * wide).to(rows.dtype)
