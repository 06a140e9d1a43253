"""The whole model: embedding, blocks, final norm, unembedding; one call is one step of a ragged batch.

Built empty (on the meta device, no memory) and filled by `load.build_model`, which checks every name and shape. The
residual stream, the weights of the linear layers and the cache are in the model's dtype; norms, sinks, the router (see
moe.py) and everything inside an operation are fp32 at least, and logits are returned so.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from gptoss_kernels.reference.experts import empty_matrices
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.attention import Attention
from gptoss_lab.model.cache import SequenceCache
from gptoss_lab.model.collectives import Collectives, OneRank
from gptoss_lab.model.moe import ExpertProjection, MoE, Router
from gptoss_lab.model.norm import RMSNorm
from gptoss_lab.model.observe import Observe
from gptoss_lab.model.operations import Operations
from gptoss_lab.model.rope import Rope
from gptoss_lab.model.step import SplitStep, Step, check_new_tokens, positions_of
from gptoss_lab.model.vocabulary import VocabularyEmbedding
from gptoss_lab.parallel.sequence import SequenceSplit
from gptoss_lab.parallel.share import Share, whole


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        operations: Operations,
        collectives: Collectives,
        dtype: torch.dtype,
        router_dtype: torch.dtype,
        expert_form: str,
        share: Share,
    ) -> None:
        super().__init__()
        h, i, e = config.hidden_size, len(share.expert_rows), len(share.experts)
        window = config.sliding_window if config.is_sliding(layer) else None
        self.layer = layer
        self.attention_norm = RMSNorm(h, config.rms_norm_eps, operations)
        self.attention = Attention(
            layer, h, len(share.heads), len(share.kv_heads), config.head_dim, window, operations, collectives, dtype,
        )
        self.moe_norm = RMSNorm(h, config.rms_norm_eps, operations)
        self.moe = MoE(
            layer,
            Router(h, config.num_experts, config.experts_per_token, operations, router_dtype),
            ExpertProjection(empty_matrices(expert_form, e, 2 * i, h, dtype), torch.empty(e, 2 * i, dtype=dtype)),
            ExpertProjection(empty_matrices(expert_form, e, h, i, dtype), torch.empty(e, h, dtype=dtype)),
            config.swiglu_alpha, config.swiglu_limit, operations, collectives, share.experts.start,
        )

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [T, H], the residual stream -> [T, H]."""
        if step.observe is not None:
            step.observe("hidden_norm", self.layer, root_mean_square(x))
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.moe(self.moe_norm(x), step)


class Transformer(nn.Module):
    """gpt-oss, or one rank's share of it, on one device. `load_model` makes one; the package's docstring shows its use.

    share: what of the model is here (default: all of it). collectives: how the ranks that hold the rest are reached.
    """

    def __init__(
        self,
        config: ModelConfig,
        operations: Operations,
        *,
        dtype: torch.dtype,
        router_dtype: torch.dtype,
        expert_form: str,
        device: torch.device | str = "cpu",
        collectives: Collectives | None = None,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self.config, self.operations, self.dtype, self.device = config, operations, dtype, torch.device(device)
        self.ranks: Collectives = OneRank() if collectives is None else collectives
        self.share = whole(config) if share is None else share
        vocabulary = self.share.vocabulary
        with torch.device("meta"):
            self.embedding = VocabularyEmbedding(vocabulary, config.vocab_size, config.hidden_size, dtype)
            self.layers = nn.ModuleList(
                Block(config, n, operations, self.ranks, dtype, router_dtype, expert_form, self.share)
                for n in range(config.num_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
            self.unembedding = nn.Linear(config.hidden_size, len(vocabulary), bias=False, dtype=dtype)
        self.rope = Rope(config.rope, config.head_dim, self.device)
        self.requires_grad_(False)

    def new_cache(self, capacity: int = 256, draft: int = 0) -> SequenceCache:
        """An empty cache for one sequence. capacity: tokens its full layers have room for before they must grow.
        draft: tokens that may be taken back."""
        return SequenceCache(self.config, self.dtype, self.device, capacity, self.layers[0].attention.split[1], draft)

    def forward(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int] | None = None,
        caches: Sequence[SequenceCache] | None = None,
        *,
        logits: str = "last",
        observe: Observe | None = None,
        hidden: bool = False,
    ) -> torch.Tensor | None | tuple[torch.Tensor, torch.Tensor]:
        """One step of a ragged batch of B sequences.

        token_ids: [T] int64 on the model's device, the new tokens of all sequences one after the other. lengths: B
        counts of new tokens, each at least 1, T in all (default: one sequence). caches: B caches, extended by this
        step; None for a single pass from position 0 that keeps nothing. observe: see observe.py.
        logits: "last" returns [B, V], the row of each sequence's last token; "all" returns [T, V]; "none" returns None
        (a chunk of a longer prompt). fp32, or fp64 for an fp64 model. With several ranks all of them call, each with
        the sequences of its data-parallel group, which may be none.
        hidden: return (logits, state) with the rows of state, [.., H], that the logits were read from, after the norm.
        ValueError: counts that do not fit, an empty sequence, a cache given twice, more tokens than the model's length.
        """
        lengths = [token_ids.shape[0]] if lengths is None else lengths
        starts = check_new_tokens(token_ids, lengths, caches, logits, self.config.max_position_embeddings,
                                  self.ranks.may_idle)
        offsets = tuple(accumulate(lengths, initial=0))
        split = self.ranks.start(lengths, caches is not None, self.device)
        step = self._step(offsets, lengths, starts, caches, observe, split)
        x = self.ranks.reduce_embedding(self.embedding(token_ids).to(self.dtype))       # [T, H]
        for block in self.layers:
            x = block(x, step)
        if observe is not None:
            observe("hidden_norm", len(self.layers), root_mean_square(x))
        if caches is not None:
            for cache, tokens in zip(caches, lengths, strict=True):
                cache.commit(tokens)
        if logits == "none":
            return None
        if split is not None:
            x = split.last(x) if logits == "last" else split.all(x)
        elif logits == "last":
            x = x[[end - 1 for end in offsets[1:]]]                                     # [B, H]
        state = self.norm(x)
        wide = self.unembedding(state).to(torch.promote_types(self.dtype, torch.float32))
        return (self.ranks.gather_logits(wide), state) if hidden else self.ranks.gather_logits(wide)

    def _step(
        self,
        offsets: tuple[int, ...],
        lengths: Sequence[int],
        starts: Sequence[int],
        caches: Sequence[SequenceCache] | None,
        observe: Observe | None,
        split: SequenceSplit | None,
    ) -> Step:
        """What the layers share; for a split step with the offsets and angles of this rank's rows."""
        positions = positions_of(lengths, starts, self.device)
        if split is None:
            return Step(offsets, *self.rope(positions), caches, observe)
        own = tuple(accumulate((s.stop - s.start for s in split.own), initial=0))
        windows = tuple(block.attention.window for block in self.layers)
        return SplitStep(own, *self.rope(positions[split.rows]), caches, observe, split, windows)


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T] fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(dim=-1).sqrt()
