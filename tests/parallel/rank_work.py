"""What real ranks are told to do in the tests: plain functions, so that a process of its own can import them."""
from __future__ import annotations

import os
import signal
import time

import torch

from gptoss_lab.engine.disaggregation import Disaggregated
from gptoss_lab.engine.ranks import RankEngine, load_fast_share, load_share
from gptoss_lab.parallel import Plan, PlanError, RankError


def complete(own, path, plan, prompts, sampling, dispatch="gather"):
    model = load_share(path, own.plan_groups(plan), own.device, torch.float32, dispatch=dispatch)
    print("loaded", plan)
    return RankEngine(model).complete(prompts, sampling)


def complete_fast(own, path, plan, prompts, sampling, full_logits=False, **options):
    """The same in the fast forward; also how ranks' sums were made."""
    model = load_fast_share(path, own.plan_groups(plan), own.device, torch.float32, tokens=1024, sequences=4,
                            projections="dense", sizes=(1, 2, 4), full_logits=full_logits, rank_rows=256, **options)
    return RankEngine(model).complete(prompts, sampling), model._forward.sum.reason


def fast_error(own, path, plan, exact):
    """bf16 on GPUs, e4m3 experts: largest relative error of the logits of a prompt and of captured decode steps against
    `exact` [steps, V], and how ranks' sums were made."""
    model = load_fast_share(path, own.plan_groups(plan), own.device, tokens=1024, sequences=2, projections="dense",
                            sizes=(1, 2), full_logits=True, rank_rows=256)
    caches = [model.new_cache()] if not model.ranks.groups.place.dp else []
    found = []
    for ids in [torch.arange(200), *(torch.tensor([n]) for n in range(len(exact) - 1))]:
        ids = ids.to(own.device) if caches else ids[:0].to(own.device)
        found.append(model(ids, [len(ids)] * len(caches), caches))
    if not caches:
        return 0.0, model._forward.sum.reason
    rows = torch.cat(found).cpu()
    return ((rows - exact).norm(dim=1) / exact.norm(dim=1)).max().item(), model._forward.sum.reason


def places(own, plan):
    groups = own.plan_groups(plan)
    return groups.place, groups.tensor.index, groups.tensor.size, groups.data.index, groups.data.size


def exchange(own):
    """Uneven rows through every kind of exchange, in bf16."""
    group = own.group(range(own.world))
    counts = [2 * (r == 1) + r for r in range(own.world)]
    mine = torch.full((counts[own.rank], 3), float(own.rank)).bfloat16()
    rows = torch.arange(sum(counts)).float()[:, None].expand(sum(counts), 2)
    return {
        "sum": group.all_reduce(torch.full((5,), own.rank + 1.0), "sum"),
        "gather": group.all_gather(mine, counts, "gather"),
        "scatter": group.reduce_scatter(rows * (own.rank + 1), counts, "scatter"),
        "to all": group.all_to_all(torch.cat([torch.full((r,), own.rank) for r in range(own.world)]),
                                   list(range(own.world)), [own.rank] * own.world, "to all"),
    }


def pass_on(own):
    group = own.group(range(own.world))
    if own.rank == 0:
        group.send(torch.arange(6).view(2, 3), 1, "a")()
        return None
    if own.rank == 1:
        return group.receive(torch.empty(2, 3, dtype=torch.int64), 0, "a")
    return None


def process_id(own):
    return os.getpid()


def die(own, rank):
    if own.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    own.group(range(own.world)).all_reduce(torch.ones(1), "sum")


def hang(own, rank):
    group = own.group(range(own.world))
    group.all_reduce(torch.ones(1), "first")
    if own.rank == rank:
        time.sleep(600)
    group.all_reduce(torch.ones(1), "second")


def sleep(own, rank):
    if own.rank == rank:
        time.sleep(600)


def complain(own, rank):
    print("about to complain")
    if own.rank == rank:
        raise ValueError("these weights are odd")
    own.group(range(own.world)).all_reduce(torch.ones(1), "sum")


def disagree(own):
    try:
        own.agree("plan", str(Plan(own.rank % 2 + 1, 1, 2)))
    except RankError as error:
        return str(error)


def too_large(own):
    try:
        own.plan_groups(Plan(1, 1, 8))
    except PlanError as error:
        return str(error)


def hand_over(own, path, pair, prompts, sampling):
    engine = Disaggregated(own, path, pair, own.device, torch.float32, chunk=16, page_size=8)
    return engine.complete(prompts, sampling)
