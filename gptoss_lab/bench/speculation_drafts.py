"""Who runs and who drafts in `bench speculation`: a checkpoint as a model, and the decoders that are compared on it.

Two forwards. "plain" is the readable one, any device, fp32 on the CPU; only there can a draft be made by spoiling the
model, since that moves dense weights. "fast" is the one that serves: weights laid out for the kernels, paged caches,
captured steps.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.reference.norm import rms_norm
from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.engine.decoders.cached import CachedDecoder
from gptoss_lab.engine.decoders.drafting import DraftingDecoder
from gptoss_lab.engine.decoders.mtp import Head, MtpDecoder, load_heads
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model import Transformer, load_model
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool

ROOM = 1024
"""Positions that each sequence may come to hold in the fast forward's caches."""


@dataclass(frozen=True)
class Drafts:
    """Who drafts; exactly one of the three. checkpoint: a smaller model. noise: a copy of the model with weights off by
    so many of their standard deviations. heads: a file of prediction heads. ValueError."""

    checkpoint: Path | None = None
    noise: float | None = None
    heads: Path | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("checkpoint", "noise", "heads") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"drafts come from {' and '.join(given) or 'nowhere'}; one of a draft checkpoint, a noise "
                             "and a file of heads is expected")
        if self.noise is not None and not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise is {self.noise}; a finite number of at least 0 is expected")

    @property
    def name(self) -> str:
        """For the row."""
        if self.noise is not None:
            return f"the model with noise {self.noise:g}"
        return f"heads of {self.heads.name}" if self.heads else f"checkpoint {self.checkpoint.name}"


@dataclass(frozen=True)
class Pair:
    """The model, and what drafts for it: a second model or heads."""

    model: Any
    draft: Any = None
    heads: tuple[Head, ...] = ()

    def plain(self) -> CachedDecoder:
        """Without drafts."""
        return PlainDecoder(self.model)

    def drafting(self, draft_tokens: int) -> DraftingDecoder:
        """With drafts of at most so many tokens; ValueError if there are not so many heads."""
        if not self.heads:
            return SpeculativeDecoder(self.model, self.draft, draft_tokens)
        if draft_tokens > len(self.heads):
            raise ValueError(f"drafts of {draft_tokens} tokens need as many heads; there are {len(self.heads)}")
        return MtpDecoder(self.model, self.heads[:draft_tokens])

    def proposing(self, batch: int) -> Callable[[], Any] | None:
        """One proposal of the first head for so many sequences, as work to be timed; None for a draft model."""
        if not self.heads:
            return None
        state = torch.randn(batch, self.model.config.hidden_size, device=self.model.device).to(self.model.dtype)
        ids, eps = torch.zeros(batch, dtype=torch.int64, device=self.model.device), self.model.config.rms_norm_eps

        def propose() -> torch.Tensor:
            moved = self.heads[0](state, self.model.embedding(ids).to(state.dtype), eps)
            return self.model.unembedding(rms_norm(moved, self.heads[0].norm, eps)).argmax(-1)

        return propose


def load_pair(
    path: Path, drafts: Drafts, device: torch.device, dtype: torch.dtype, *, forward: str = "plain",
    experts: str = "fp8", batch: int = 8, draft_tokens: int = 8,
) -> Pair:
    """Load the model and what drafts.

    forward: "plain" or "fast". experts: form of the fast forward's expert weights. batch, draft_tokens: the most of
    both, which size its caches. ValueError for a noise with the fast forward or an unknown forward.
    """
    if forward not in ("plain", "fast"):
        raise ValueError(f"forward is {forward!r}; 'plain' or 'fast'")
    if forward == "fast" and drafts.noise is not None:
        raise ValueError("noise moves dense weights, which the fast forward does not keep; take the plain one, or a "
                         "draft checkpoint")

    def load(folder: Path) -> Any:
        if forward == "plain":
            return load_model(folder, device, dtype)
        weights = lay_out(open_checkpoint(folder), device, dtype, experts=experts)
        pool = make_pool(weights, tokens=batch * ROOM, sequences=batch, draft=draft_tokens + 1)
        sizes = sorted({1, batch, batch * (draft_tokens + 1)})
        return FastTransformer(weights, pool, sizes=sizes, max_kv_len=ROOM)

    model = load(path)
    if drafts.heads is not None:
        return Pair(model, heads=tuple(load_heads(drafts.heads, model)))
    return Pair(model, spoiled(model, drafts.noise) if drafts.noise is not None else load(drafts.checkpoint))


@torch.no_grad()
def spoiled(model: Transformer, noise: float, seed: int = 0) -> Transformer:
    """A copy whose layers' weights are off by `noise` of their own standard deviations; embedding and unembedding are
    shared with the model. The experts' weights must be dense."""
    layers, g = copy.deepcopy(model.layers), torch.Generator().manual_seed(seed)
    for weight in layers.parameters():
        drawn = torch.randn(weight.shape, generator=g).to(weight.device)
        weight += (noise * weight.float().std(unbiased=False) * drawn).to(weight.dtype)
    draft = copy.copy(model)
    draft._modules = {**model._modules, "layers": layers}
    return draft
