"""One replica over several ranks: who holds what, which bytes each reads, what they say to each other, how they start.

    plan = Plan.parse("EP4 DP1 TP4")
    share_of(config, plan, 2)                   heads, experts and rows of rank 2
    simulate(4, function, ...)                  four ranks as threads: function(ranks, ...) in each
    with Ranks(4) as ranks: ranks.run(f, ...)   four processes over gloo or NCCL: f(ranks, ...) in each
    ranks.plan_groups(plan)                     in either: this rank's place and groups, for PlanCollectives

    plan.py         Plan: ep, dp, tp, and why a plan cannot cut a model
    cuts.py         where an axis is cut
    share.py        Place and Share: what one rank holds
    rules.py        the region of every stored tensor that a share needs
    source.py       a checkpoint as one rank reads it
    traffic.py      which exchanges a plan needs and their bytes
    groups.py       the exchanges; torch_group.py over torch.distributed, simulated.py between threads
    collectives.py  the model's collectives for a plan: sums, dispatch, combine
    residual.py     residual + sum over the ranks (+ norm): one kernel over NVLink, or an all-reduce
    own_rows.py     the same for long prompts: each rank sums rows of its own and hands them out in e4m3
    sequence.py     splitting the tokens of a step (SP)
    vocabulary.py   choosing tokens from sharded logits
    launch.py       processes on this machine; torch_ranks.py one process, also under torchrun; watch.py who is late
"""
from gptoss_lab.parallel.collectives import PlanCollectives, PlanGroups
from gptoss_lab.parallel.errors import PlanError, RankError
from gptoss_lab.parallel.launch import Ranks
from gptoss_lab.parallel.plan import Plan, refused_plans, valid_plans
from gptoss_lab.parallel.share import Place, Share, place_of, share_of, shares
from gptoss_lab.parallel.simulated import simulate
from gptoss_lab.parallel.source import ShardedSource
from gptoss_lab.parallel.torch_ranks import TorchRanks, from_torchrun

__all__ = [
    "Place", "Plan", "PlanCollectives", "PlanError", "PlanGroups", "RankError", "Ranks", "Share", "ShardedSource",
    "TorchRanks", "from_torchrun", "place_of", "refused_plans", "share_of", "shares", "simulate", "valid_plans",
]
