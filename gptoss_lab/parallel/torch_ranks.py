"""One process as a rank of torch.distributed: its device, its groups for a plan by torch's device mesh, a handshake."""
from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gptoss_lab.parallel.collectives import PlanGroups
from gptoss_lab.parallel.errors import PlanError, RankError
from gptoss_lab.parallel.groups import Group, Watch
from gptoss_lab.parallel.plan import Plan
from gptoss_lab.parallel.share import Place
from gptoss_lab.parallel.torch_group import TorchGroup


class TorchRanks:
    """This process among the ranks of the default process group, which must be initialised.

    rank, world: torch's. device: cuda:LOCAL_RANK under NCCL, the CPU under gloo. watch: told of every exchange.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self.rank, self.world, self._watch = dist.get_rank(), dist.get_world_size(), watch
        self.device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)

    def group(self, members: Sequence[int]) -> Group | None:
        """A group of these ranks; every rank of the world must ask for it. None for a rank that is not in it."""
        process_group = dist.new_group(list(members))
        return self._group(process_group, len(members)) if self.rank in members else None

    def plan_groups(self, plan: Plan, first: int | None = None) -> PlanGroups | None:
        """This rank's groups of a plan whose ranks are `first` and those after it; every rank of the world must ask.

        first None: the plan takes all ranks. None for a rank outside. PlanError if the world has another size.
        """
        start = check_world(plan, first, self.world)
        everyone = torch.arange(start, start + plan.world)
        kind = self.device.type
        mesh = DeviceMesh(kind, everyone.view(plan.dp, plan.tp), mesh_dim_names=("dp", "tp"))
        experts = DeviceMesh(kind, everyone.view(plan.ep, plan.expert_slices), mesh_dim_names=("ep", "slice"))
        world = dist.group.WORLD if plan.world == self.world else dist.new_group(everyone.tolist())
        if mesh.get_coordinate() is None:
            return None
        place = Place(*mesh.get_coordinate(), *experts.get_coordinate())
        return PlanGroups(plan, place, self._group(mesh.get_group("tp"), plan.tp),
                          self._group(mesh.get_group("dp"), plan.dp), self._group(world, plan.world))

    def agree(self, what: str, value: str) -> None:
        """RankError, naming the rank, unless all ranks give the same value."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RankError(f"{what} is {other!r} on rank {rank} and {found[0]!r} on rank 0; "
                                "all ranks must be given the same", rank)

    def _group(self, process_group: dist.ProcessGroup, size: int) -> Group:
        return Group() if size == 1 else TorchGroup(process_group, self._watch)


def check_world(plan: Plan, first: int | None, world: int) -> int:
    """The number of the plan's first rank. PlanError unless a world of `world` ranks has room for it."""
    if first is None and plan.world != world:
        raise PlanError(f"{plan} has {plan.world} ranks; {world} were started")
    if first is not None and first + plan.world > world:
        raise PlanError(f"{plan} needs {plan.world} ranks from rank {first} on; there are {world} in all")
    return first or 0


def from_torchrun(timeout: float = 60.0) -> TorchRanks:
    """Join the ranks that torchrun started: NCCL where each has a GPU, else gloo. Also across nodes.

    timeout: seconds after which an exchange that a rank does not come to ends every rank with an error.
    """
    if "RANK" not in os.environ:
        raise RankError("RANK is not in the environment; start with torchrun --nproc-per-node N")
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > local
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    return TorchRanks()
