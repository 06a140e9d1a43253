"""What a rank does in a sweep: hold one share of a model, compare it with one rank, time prompts and decode steps.

The ranks stay from one task to the next, so the model is kept between them (`_HELD`), one at a time.
"""
from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gptoss_lab.bench.decode import RESERVE, intervals, no_room
from gptoss_lab.bench.fast_model import free_bytes, give_back
from gptoss_lab.bench.rank_model import RankSubject, centre_routers, fast_weights, plain_model
from gptoss_lab.cost import kv_bytes
from gptoss_lab.model.fast import FastTransformer, fast_share
from gptoss_lab.parallel import PlanCollectives, TorchRanks
from gptoss_lab.parallel.collectives import PlanGroups
from gptoss_lab.parallel.groups import Group

_HELD: dict[str, Any] = {}
CHECKED_LAYERS, CHECKED_TOKENS = 2, 200
WARM = 1
WARM_SECONDS = 0.5                                        # of prompts on a GPU, until its clocks are those of work


def dtype_of(own: TorchRanks) -> torch.dtype:
    """bf16 on a GPU, fp32 on the CPU."""
    return torch.bfloat16 if own.device.type == "cuda" else torch.float32


def prepare(own: TorchRanks, subject: RankSubject, rows: int = 8192) -> float:
    """Forget what was held and load this rank's share. Returns the seconds it took.

    rows: the longest prompt to come, for the buffers of the ranks' sums. Routers of made weights are set so that
    experts are used about evenly.
    """
    _HELD.clear()
    give_back(own.device)
    begin = time.perf_counter()
    groups = own.plan_groups(subject.plan)
    _HELD.update(subject=subject, groups=groups, rows=rows, everyone=own.group(range(own.world)))
    if subject.fast:
        weights = fast_weights(subject, groups, own.device, dtype_of(own))
        _HELD.update(weights=weights, ranks=PlanCollectives(subject.config, groups) if own.world > 1 else None)
        if subject.checkpoint is None:
            centre_routers(weights, groups)
    else:
        _HELD["model"] = plain_model(subject, groups, own.device, dtype_of(own))
    return time.perf_counter() - begin


@torch.inference_mode()
def small_logits(own: TorchRanks, subject: RankSubject) -> torch.Tensor | None:
    """Logits [tokens, V] on the CPU of a small prompt through two layers; of the first rank only, to compare with TP1.
    """
    _HELD.clear()                                         # another process may need the room for the same
    give_back(own.device)
    small = replace(subject, config=subject.config.with_layers(CHECKED_LAYERS))
    groups = own.plan_groups(subject.plan)
    ids = random_ids(subject.config.vocab_size, CHECKED_TOKENS, own.device)
    if subject.fast:
        weights = fast_weights(small, groups, own.device, dtype_of(own))
        model = fast_share(weights, groups, tokens=2 * CHECKED_TOKENS, sequences=1, graphs=False)
    else:
        model = plain_model(small, groups, own.device, dtype_of(own))
    if groups.place.dp:                                   # the prompt is the first group's; the others work for it
        model(ids[:0], [], [])
        return None
    logits = model(ids, logits="all")
    return logits.cpu() if own.rank == 0 else None


@torch.inference_mode()
def prefill(own: TorchRanks, tokens: int, batch: int, repetitions: int) -> list[float]:
    """Seconds of a prefill of `batch` prompts of `tokens` tokens, this rank's part of them, reading by reading."""
    subject, groups, everyone = _HELD["subject"], _HELD["groups"], _HELD["everyone"]
    mine = len(range(groups.place.dp, batch, subject.plan.dp))
    ids = random_ids(subject.config.vocab_size, tokens * mine, own.device, seed=groups.place.dp)
    model = _fast(groups, tokens * mine, mine, graphs=False) if subject.fast else _HELD["model"]

    def once() -> float:
        caches = [model.new_cache(tokens) for _ in range(mine)]
        _meet(own, everyone)
        begin = time.perf_counter()
        logits = model(ids, [tokens] * mine, caches)
        _meet(own, everyone)
        seconds = time.perf_counter() - begin
        if mine and not bool(torch.isfinite(logits).all()):
            raise RuntimeError(f"prefill of {tokens} tokens: the logits are not finite")
        _release(caches)
        return seconds

    first = torch.tensor([once()], dtype=torch.float32, device=own.device)
    if own.device.type == "cuda":
        slowest = everyone.all_gather(first, [1] * own.world, "warm").max().item()        # as often on all ranks
        for _ in range(int(WARM_SECONDS / slowest)):
            once()
    return [once() for _ in range(repetitions)]


@torch.inference_mode()
def decode(own: TorchRanks, tokens: int, batch: int, steps: int) -> list[float] | str:
    """Milliseconds of decode steps of `batch` sequences in all, each at `tokens` tokens, reading by reading; or, on all
    ranks, why there is no room.

    Keys and values are random; the fast forward replays captured steps, one right after the other.
    """
    subject, groups, everyone = _HELD["subject"], _HELD["groups"], _HELD["everyone"]
    mine = len(range(groups.place.dp, batch, subject.plan.dp))
    room = tokens + steps + WARM + 8
    obstacle = _no_room(own, everyone, groups, mine, room)
    if obstacle is not None:
        return obstacle
    size = -(-batch // subject.plan.dp)                   # of the largest group, and so of every captured step
    model = _fast(groups, room * mine, mine, sizes=(size,), max_kv_len=room) if subject.fast else _HELD["model"]
    caches = [_filled(model, tokens - 1, room, seed) for seed in range(mine)]
    ids = random_ids(subject.config.vocab_size, (steps + WARM) * max(mine, 1), own.device).view(steps + WARM, -1)
    rows = list(ids[:, :mine])
    for row in rows[:WARM]:
        logits = model(row, [1] * mine, caches)
    if mine and not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"decode at {tokens} tokens: the logits are not finite")
    _meet(own, everyone)
    times = intervals(own.device, [partial(model, row, [1] * mine, caches) for row in rows[WARM:]])
    _release(caches)
    return times


def _no_room(own: TorchRanks, everyone: Group, groups: PlanGroups, sequences: int, tokens: int
             ) -> str | None:
    """Why keys and values of so many sequences do not fit on some rank, the same answer on all; None if they do."""
    config, free = _HELD["subject"].config, free_bytes(own.device)
    if free is None:
        return None
    needed = sequences * kv_bytes(config, tokens) * len(groups.share(config).kv_heads) / config.num_kv_heads
    most = everyone.all_gather(torch.tensor([[needed, free - RESERVE]], device=own.device), [1] * own.world, "room")
    if all(wanted <= left for wanted, left in most.tolist()):
        return None
    return no_room(*max(most.tolist(), key=lambda pair: pair[0] - pair[1]), " on a rank")


def _fast(groups: PlanGroups, tokens: int, sequences: int, **options: Any) -> FastTransformer:
    """The fast forward over the weights that are held; the buffers of the ranks' sums are sized once."""
    give_back(_HELD["weights"].device)
    return fast_share(_HELD["weights"], groups, tokens=max(tokens, 64), sequences=max(sequences, 1),
                      ranks=_HELD["ranks"], rank_rows=_HELD["rows"], **options)


def random_ids(vocabulary: int, count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[count] int64, the same on every rank."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).to(device)


def _filled(model: Any, length: int, room: int, seed: int) -> Any:
    """A cache that holds `length` random positions."""
    cache = model.new_cache(room)
    if hasattr(cache, "reserve"):
        cache.reserve(length)
        if seed == 0:
            for pages in (*model.pool.keys, *model.pool.values):
                pages.normal_()
        cache.commit(length)
        return cache
    heads, dim = model.layers[0].attention.split[1], model.config.head_dim
    rows = torch.randn(2, length, heads, dim, dtype=model.dtype, device=model.device)
    for n, layer in enumerate(cache.layers):
        kept = min(length, model.config.sliding_window) if model.config.is_sliding(n) else length
        layer.extend(rows[0, :kept], rows[1, :kept])
    cache.commit(length)
    return cache


def _release(caches: list[Any]) -> None:
    for cache in caches:
        if hasattr(cache, "release"):
            cache.release()


def _meet(own: TorchRanks, everyone: Group) -> None:
    """All ranks start together, and what was launched before has ended."""
    everyone.all_reduce(torch.zeros(1, device=own.device), "start")
    if own.device.type == "cuda":
        torch.cuda.synchronize()
