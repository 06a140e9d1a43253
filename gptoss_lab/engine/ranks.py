"""The engine as one of several ranks: all are given the same prompts and run the same steps.

A data-parallel group takes every dp-th prompt. The ranks of a group draw the same tokens, each from its shard of the
logits. Groups differ in how many steps they need, but the experts are everyone's: before each step the groups say
whether they have work left, and one that has none takes an empty step as long as another goes on.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.sharded import ShardedDecoder
from gptoss_lab.engine.engine import DEFAULT, Completion, Engine
from gptoss_lab.engine.errors import SamplingError
from gptoss_lab.engine.request import Event, Request
from gptoss_lab.engine.sampling import SamplingParams
from gptoss_lab.model import Transformer, load_model
from gptoss_lab.model.fast import FastTransformer, fast_share, lay_out_share
from gptoss_lab.model.paged import PagePool
from gptoss_lab.parallel.collectives import PlanCollectives, PlanGroups
from gptoss_lab.parallel.vocabulary import VocabularyShards


def load_share(
    path: str | Path, groups: PlanGroups, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    *, dispatch: str = "gather", full_logits: bool = False, **options: Any,
) -> Transformer:
    """This rank's share of a checkpoint, with the collectives of its plan. options: as for `load_model`."""
    config = open_checkpoint(path).config
    collectives = PlanCollectives(config, groups, dispatch, full_logits)
    return load_model(path, device, dtype, share=groups.share(config), collectives=collectives, **options)


def load_fast_share(
    path: str | Path, groups: PlanGroups, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, *,
    tokens: int, sequences: int, experts: str = "fp8", projections: str = "fp8", full_logits: bool = False,
    **options: Any,
) -> FastTransformer:
    """The same in the fast forward, with a pool for `tokens` positions of `sequences` sequences.

    experts, projections: as for `lay_out`. options: as for `fast_share`. All ranks call together.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    weights = lay_out_share(checkpoint, groups.share(config), device, dtype, experts=experts, projections=projections)
    return fast_share(weights, groups, tokens=tokens, sequences=sequences,
                      ranks=PlanCollectives(config, groups, full_logits=full_logits), **options)


class RankEngine:
    """One rank's engine. model: this rank's share, made by `load_share` or `load_fast_share`. step_tokens, pool: as for
    `PlainDecoder`."""

    def __init__(
        self, model: Transformer | FastTransformer, step_tokens: int = 8192, pool: PagePool | None = None
    ) -> None:
        self.model, self.groups = model, model.ranks.groups
        self.decoder = PlainDecoder(model, step_tokens, pool)
        if self.groups.tensor.size > 1 and not model.ranks.full_logits:
            shards = VocabularyShards(model.share.vocabulary, self.groups.tensor)
            self.decoder = ShardedDecoder(model, shards, step_tokens, pool)
        self._engine = Engine(model, self.decoder)

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] = DEFAULT
    ) -> dict[int, Completion]:
        """Number -> completion of the prompts that this rank's data-parallel group serves (every dp-th).

        prompts, sampling: the same on every rank. SamplingError for sampling without a seed, since ranks would draw
        different ones; otherwise as `Engine.generate`.
        """
        batch = self.requests(prompts, sampling)
        for request in batch:
            self.decoder.start(request)
        return self.run(batch, {request.index: [] for request in batch})

    def requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """The checked requests of this rank's data-parallel group, not started. Errors as for `complete`."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise SamplingError(f"sampling has {len(each)} entries for {len(prompts)} prompts; one each is expected")
        if any(p.temperature > 0 and p.seed is None for p in each):
            raise SamplingError("sampling on several ranks needs a seed, or they would draw different tokens")
        numbers = range(self.groups.place.dp, len(prompts), self.groups.plan.dp)
        return [self._engine.request(n, prompts[n], each[n]) for n in numbers]

    def run(self, batch: list[Request], events: dict[int, list[Event]]) -> dict[int, Completion]:
        """Move started requests on until all are finished, and those of the other data-parallel groups are too.

        events: what each has yielded so far, by number; one whose last event has `finish` set need not be in the batch.
        """
        while self.anyone(bool(batch)):
            if not batch:
                self.idle()
                continue
            for request, found in zip(batch, self.decoder.step(batch), strict=True):
                for new in found:
                    events[request.index].append(request.take(new))
                    if events[request.index][-1].finish is not None:
                        break
            for request in batch:
                if events[request.index] and events[request.index][-1].finish is not None:
                    self.decoder.stop(request)
            batch = [request for request in batch if request.state is not None]
        return {
            n: Completion(tuple(e.token for e in own), tuple(e.logprob for e in own), own[-1].finish)
            for n, own in events.items()
        }

    def anyone(self, mine: bool) -> bool:
        """Whether any data-parallel group has work."""
        if self.groups.data.size == 1:
            return mine
        flag = torch.tensor([int(mine)], device=self.model.device)
        return bool(self.groups.data.all_reduce(flag, "work left"))

    @torch.inference_mode()
    def idle(self) -> None:
        """A step without tokens of our own: our experts work for the others."""
        self.model(torch.empty(0, dtype=torch.int64, device=self.model.device), [], [], logits="none")


def merged(results: Sequence[dict[int, Completion]]) -> list[Completion]:
    """The completions of all ranks in the order of the prompts. ValueError where two ranks of a group differ."""
    found: dict[int, Completion] = {}
    for rank, own in enumerate(results):
        for number, completion in own.items():
            if found.setdefault(number, completion).tokens != completion.tokens:
                raise ValueError(f"prompt {number}: rank {rank} has other tokens than the ranks before it")
    return [found[number] for number in sorted(found)]
