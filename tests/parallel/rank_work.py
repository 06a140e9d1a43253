"""What real ranks are told to do in the tests: plain functions, so that a process of its own can import them."""
from __future__ import annotations

import os
import signal
import time

import torch

from gptoss_lab.bench.rank_model import RankSubject, centre_routers, fast_weights
from gptoss_lab.config import preset
from gptoss_lab.engine.disaggregation import Disaggregated
from gptoss_lab.engine.ranks import RankEngine, load_fast_share, load_share
from gptoss_lab.model.fast import fast_share
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


def own_rows_error(own, plan, rounds):
    """Three layers of gpt-oss-20b with made weights, e4m3 throughout: prompts whose rows are cut between the ranks
    against the same ones by whole sums, several times over. The largest median of a round of the rows' relative errors;
    whether repeated runs gave the same bits; and the rows of the steps that were cut."""
    subject = RankSubject(preset("gpt-oss-20b").with_layers(3), plan, "fp8", projections="fp8")
    groups = own.plan_groups(plan)
    weights = fast_weights(subject, groups, own.device, torch.bfloat16)
    centre_routers(weights, groups)
    model = fast_share(weights, groups, tokens=8192, sequences=2, sizes=(1, 2), graphs=False, rank_rows=4096)
    cut, taken = model._forward.own_rows, []
    takes = cut.takes
    cut.takes = lambda rows: takes(rows) and not taken.append(rows)

    def logits(seed):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, subject.config.vocab_size, (3300,), generator=g).to(own.device)
        caches = [model.new_cache() for _ in range(2)]
        found = [model(ids[:1501], [1401, 100], caches), model(ids[1501:3000], [99, 1400], caches, logits="all"),
                 model(ids[3000:3298], [98, 200], caches), model(ids[3298:], [1, 1], caches)]
        for cache in caches:
            cache.release()
        return torch.cat([rows.float() for rows in found])

    medians, same = [], True
    for seed in range(rounds):
        model._forward.own_rows = cut
        ours, again = logits(seed), logits(seed)
        same = same and torch.equal(ours, again)
        model._forward.own_rows = None
        whole = logits(seed)
        medians.append(((ours - whole).norm(dim=1) / whole.norm(dim=1)).median().item())
    return max(medians), same, sorted(set(taken))


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


def parent_id(own):
    return os.getppid()


def variable(own, name):
    return os.environ.get(name)


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
