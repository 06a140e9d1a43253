"""One rank's share in the fast forward: its heads, its experts and its rows of the head, laid out; a pool of its heads.

    weights = lay_out_share(open_checkpoint(path), groups.share(config), "cuda", experts="fp8")
    model = fast_share(weights, groups, tokens=200_000, sequences=64)      # all ranks together

The embedding is whole on every rank: looking a row up moves nothing, and a cut one would be summed over the ranks at
every step (1.2 GB of 120B are the price).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gptoss_lab.checkpoint import Checkpoint
from gptoss_lab.model.fast.transformer import FastTransformer
from gptoss_lab.model.fast.weights import FastWeights, lay_out
from gptoss_lab.model.paged import PagePool
from gptoss_lab.parallel.collectives import PlanCollectives, PlanGroups
from gptoss_lab.parallel.share import Share
from gptoss_lab.parallel.source import ShardedSource


def lay_out_share(
    checkpoint: Checkpoint, share: Share, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, **forms: str
) -> FastWeights:
    """Read this rank's slices of a checkpoint and lay them out. forms: experts and projections, as for `lay_out`."""
    weights = lay_out(ShardedSource(checkpoint, share, whole_embedding=True), device, dtype, **forms)
    first = share.experts.start
    return replace(weights, layers=tuple(
        replace(layer, moe=replace(layer.moe, first_expert=first)) for layer in weights.layers))


def fast_share(
    weights: FastWeights, groups: PlanGroups, *, tokens: int, sequences: int, page_size: int = 64,
    kv_form: str = "same", ranks: PlanCollectives | None = None, **options: Any,
) -> FastTransformer:
    """The fast forward over this rank's share; `tokens` positions of `sequences` sequences fit its pool.

    ranks: the plan's collectives, where several models follow each other (their buffers are made once) or each rank is
    to keep its own columns of the logits; default: made here, logits gathered. options: as for `FastTransformer`.
    ValueError for collectives that choose rows, which would have to be known on the host.
    """
    config = weights.config
    if ranks is not None and ranks.routed:
        raise ValueError("dispatch is 'all_to_all'; the fast forward has 'gather' alone")
    pool = PagePool(config, pages=-(-tokens // page_size) + sequences + 1, rings=sequences + 1, page_size=page_size,
                    dtype=weights.dtype, device=weights.device, kv_heads=len(groups.share(config).kv_heads),
                    kv_form=kv_form)
    if ranks is None and groups.plan.world > 1:
        ranks = PlanCollectives(config, groups)
    return FastTransformer(weights, pool, ranks=ranks, **options)
