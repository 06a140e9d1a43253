"""The fast model: the interface of the plain `Transformer`, over a pool of pages and captured decode steps.

    weights = lay_out(source, "cuda", experts="fp8", projections="fp8")
    model = FastTransformer(weights, make_pool(weights, tokens=200_000, sequences=64))
    cache = model.new_cache()
    logits = model(prompt_ids, [len(prompt_ids)], [cache])                 # prefill
    logits = model(next_id, [1], [cache])                                  # decode: a replayed graph

Every decoder, the loop and the server run on it unchanged. A step in which every sequence brings one token is decode, a
replayed graph; so is one in which each brings at most `pool.draft` more (speculative decoding verifies so), up to the
largest captured size in all. Anything else goes through the prefill path, launch by launch.

In a pool of kv_form "fp8" keys and values are kept and seen in e4m3 (step.py). Captured steps read the pool's scales
where they lie: set them before the model is made, or write into them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gptoss_kernels.upload import upload
from gptoss_lab.model.fast.decode import DecodeStep
from gptoss_lab.model.fast.forward import Forward, Observe
from gptoss_lab.model.fast.graphs import SIZES, Captured, DecodeGraphs, Outputs
from gptoss_lab.model.fast.operations import choose_fast_operations
from gptoss_lab.model.fast.ranks import RankForward
from gptoss_lab.model.fast.step import PrefillStep
from gptoss_lab.model.fast.weights import FastWeights
from gptoss_lab.model.paged import PagedCache, PagePool
from gptoss_lab.model.step import check_new_tokens
from gptoss_lab.parallel.collectives import PlanCollectives


def make_pool(
    weights: FastWeights, *, tokens: int, sequences: int, page_size: int = 64, draft: int = 0, kv_form: str = "same"
) -> PagePool:
    """A pool for so many sequences at once, whose full layers hold `tokens` positions in all.

    Page 0 and ring 0 come on top, and a half-empty last page for each sequence. draft, kv_form: see PagePool.
    """
    pages = -(-tokens // page_size) + sequences + 1
    return PagePool(weights.config, pages=pages, rings=sequences + 1, page_size=page_size, draft=draft,
                    dtype=weights.dtype, device=weights.device, kv_form=kv_form)


class FastTransformer:
    """gpt-oss on one device, fast.

    pool: of the weights' dtype and device. backends: operation -> backend (operations.py). sizes: batch
    sizes of captured decode steps. max_kv_len: the most tokens of a sequence in decode, which sizes its page tables;
    default: as many as the pool holds, up to the model's length. graphs: False runs every decode step launch by launch.
    ranks: of a plan of several ranks, with the weights of this one's share (ranks.py); all make theirs together and
    call in step. rank_rows: the most rows of a step for which the fused sums over ranks have buffers. ValueError for
    a pool that does not fit the weights; BackendUnavailable.
    """

    def __init__(
        self, weights: FastWeights, pool: PagePool, *, backends: Mapping[str, str] | None = None,
        sizes: Sequence[int] = SIZES, max_kv_len: int | None = None, graphs: bool = True,
        ranks: PlanCollectives | None = None, rank_rows: int = 8192,
    ) -> None:
        _check_pool(weights, pool)
        self.config, self.device, self.dtype = weights.config, weights.device, weights.dtype
        self.weights, self.pool, self.graphs = weights, pool, graphs
        self._scales = pool.key_scales, pool.value_scales
        self.operations = choose_fast_operations(weights.config, weights.device, weights.dtype, weights.experts,
                                                 backends)
        self.ranks, self.share = ranks, None if ranks is None else ranks.share
        self._forward = (Forward(weights, pool, self.operations) if ranks is None else
                         RankForward(weights, pool, self.operations, ranks, max(rank_rows, *sizes)))
        held = (pool.pages - 1) * pool.page_size
        self.max_kv_len = min(self.config.max_position_embeddings, held) if max_kv_len is None else max_kv_len
        self._decode = DecodeGraphs(self._decode_step, self._run_decode, self.device, sizes)
        self._eager: dict[int, DecodeStep] = {}

    def new_cache(self, capacity: int = 0, draft: int = 0) -> PagedCache:
        """An empty cache for one sequence. Pages are taken as it grows; `capacity` is not held back.

        draft: tokens that may be taken back; ValueError if the pool's rings keep fewer. CacheFull.
        """
        if draft > self.pool.draft:
            raise ValueError(f"draft is {draft}; the rings of this model's pool keep {self.pool.draft} positions more "
                             "than the window")
        return self.pool.new_cache()

    @torch.inference_mode()
    def __call__(
        self, token_ids: torch.Tensor, lengths: Sequence[int] | None = None, caches: Sequence[PagedCache] | None = None,
        *, logits: str = "last", observe: Observe | None = None, hidden: bool = False,
    ) -> torch.Tensor | None | tuple[torch.Tensor, torch.Tensor]:
        """One step of a ragged batch; arguments, result and errors as of `Transformer.forward`.

        caches: of this model's pool; without them the step keeps nothing. observe: see Forward.hidden; a step that is
        observed is not replayed. CacheFull, before anything is computed, if the pool has too few pages.
        """
        lengths = [token_ids.shape[0]] if lengths is None else list(lengths)
        if caches is None:
            return self._without_caches(token_ids, lengths, logits=logits, observe=observe, hidden=hidden)
        self._check(token_ids, lengths, caches, logits)
        for cache, new in zip(caches, lengths, strict=True):
            cache.reserve(new)
        decode = not lengths or (logits != "none" and observe is None and self._is_decode(lengths, caches))
        least = sum(lengths) if self.ranks is None else self._forward.agree(decode, sum(lengths))
        if decode and least is not None:
            outputs = self._decoded(token_ids, caches, lengths, logits, least)
        else:
            outputs = self._prefilled(token_ids, lengths, caches, logits, observe)
        for cache, new in zip(caches, lengths, strict=True):
            cache.commit(new)
        if outputs is None or logits == "none":
            return None
        wide = outputs[0].to(torch.float32, copy=True)                           # the next step overwrites them
        return (wide, outputs[1].clone()) if hidden else wide

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> list[Captured]:
        """Capture decode steps now, largest first (default: all sizes of the model)."""
        return [self._decode.capture(size) for size in sorted(sizes or self._decode.sizes, reverse=True)]

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] int64 -> the rows of the embedding [n, H]; for decoders that draft from hidden states."""
        return self.weights.embedding[ids]

    def unembedding(self, rows: torch.Tensor) -> torch.Tensor:
        """Normed rows [n, H] -> logits [n, V] in the model's dtype."""
        logits = torch.nn.functional.linear(rows, self.weights.unembedding)
        return logits if self.ranks is None else self.ranks.gather_logits(logits)

    def _is_decode(self, lengths: list[int], caches: Sequence[PagedCache]) -> bool:
        """Whether each new token can be a row of a decode step: one for each sequence, or few enough of each for the
        ring, and of all for the sizes and tables at hand."""
        longest = max(cache.length + count for cache, count in zip(caches, lengths, strict=True))
        return max(lengths) == 1 or (max(lengths) <= 1 + self.pool.draft and sum(lengths) <= self._decode.sizes[-1]
                                     and longest <= self.max_kv_len)

    def _decoded(
        self, ids: torch.Tensor, caches: Sequence[PagedCache], lengths: list[int], logits: str, least: int
    ) -> Outputs:
        """Logits [B or T, V] in the model's dtype, and the rows [B or T, H] they were read from."""
        run = self._decode if self.graphs else self._decoded_eagerly
        outputs = run(ids, caches, lengths, least)
        if logits == "all" or max(lengths, default=1) == 1:
            return outputs
        ends = _last_rows(lengths, self.device)
        return outputs[0].index_select(0, ends), outputs[1].index_select(0, ends)

    def _decoded_eagerly(
        self, ids: torch.Tensor, caches: Sequence[PagedCache], lengths: list[int], least: int
    ) -> Outputs:
        count, rows = ids.shape[0], max(ids.shape[0], least)
        if rows not in self._eager:
            self._eager[rows] = self._decode_step(rows)
        self._eager[rows].fill(ids, caches, lengths)
        logits, hidden = self._run_decode(self._eager[rows])
        return logits[:count], hidden[:count]

    def _decode_step(self, rows: int) -> DecodeStep:
        return DecodeStep(self.pool, rows, self.max_kv_len, self._forward.heads, self.operations,
                          self._forward.rows(rows))

    def _run_decode(self, decode: DecodeStep) -> Outputs:
        decode.begin()
        return self._forward.head(self._forward.hidden(decode.ids, decode.step))

    def _prefilled(
        self, ids: torch.Tensor, lengths: list[int], caches: Sequence[PagedCache], logits: str, observe: Observe | None
    ) -> Outputs | None:
        if self.ranks is not None:
            x = self._forward.prefill(ids, lengths, caches, logits, observe)
            return None if x is None else self._forward.head(x)
        step = PrefillStep(self.pool, caches, lengths, self._forward.heads, self.operations,
                           self._forward.rows(sum(lengths)))
        x = self._forward.hidden(ids, step, observe)
        if logits == "none":
            return None
        if logits == "last":
            x = x.index_select(0, _last_rows(lengths, self.device))              # [B, H]
        return self._forward.head(x)

    def _without_caches(
        self, ids: torch.Tensor, lengths: list[int], **wanted: Any
    ) -> torch.Tensor | None | tuple[torch.Tensor, torch.Tensor]:
        caches: list[PagedCache] = []
        try:
            caches.extend(self.new_cache() for _ in lengths)
            return self(ids, lengths, caches, **wanted)
        finally:
            for cache in caches:
                cache.release()

    def _check(self, ids: torch.Tensor, lengths: list[int], caches: Sequence[PagedCache], logits: str) -> None:
        check_new_tokens(ids, lengths, caches, logits, self.config.max_position_embeddings,
                         self.ranks is not None and self.ranks.may_idle)
        if any(cache.pool is not self.pool for cache in caches):
            raise ValueError("a cache belongs to another pool; `new_cache` of this model makes its caches")
        if self.pool.key_scales is not self._scales[0] or self.pool.value_scales is not self._scales[1]:
            raise ValueError("the pool's scales are other tensors than when the model was made; write into those: "
                             "captured steps read them where they lie")


def _last_rows(lengths: list[int], device: torch.device) -> torch.Tensor:
    """[B] int64: the row of each sequence's last token."""
    return upload(torch.tensor(lengths).cumsum(0) - 1, device)


def _check_pool(weights: FastWeights, pool: PagePool) -> None:
    if pool.dtype != weights.dtype or pool.device.type != weights.device.type:
        raise ValueError(f"the pool holds {pool.dtype} on {pool.device} and the weights are {weights.dtype} on "
                         f"{weights.device}; both must be alike")
    if pool.config.num_layers != weights.config.num_layers:
        raise ValueError(f"the pool has {pool.config.num_layers} layers and the weights {weights.config.num_layers}; "
                         "one number is needed")
