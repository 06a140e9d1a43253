"""Ranks in one process, one thread each: to teach with, and to test every plan in seconds.

`simulate(world, function)` calls function(ranks) in `world` threads; `ranks` gives out groups exactly as a real run
does. An exchange is a meeting: everyone lays down a tensor, and when the last has come each works out its own result
from all of them, in the order of the ranks and in fp32 at least. So results do not depend on how threads run.

A thread that raises ends the others: they stop at their next exchange. One that does not come within the time limit is
named, with what it was waited for. What is lost: speed (the threads share this machine's cores) and every effect of
real links; bytes are counted, not felt.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gptoss_lab.parallel.collectives import PlanGroups
from gptoss_lab.parallel.errors import RankError
from gptoss_lab.parallel.groups import Group
from gptoss_lab.parallel.plan import Plan
from gptoss_lab.parallel.share import place_of
from gptoss_lab.parallel.torch_ranks import check_world

TIMEOUT_SECONDS = 60.0


class Hub:
    """What the threads of one simulated world share: the meetings of every group, the mailboxes, the first failure."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failure: RankError | None = None
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self.mail: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def meeting(self, members: tuple[int, ...]) -> _Meeting:
        """The one meeting place of these ranks."""
        with self.changed:
            return self.meetings.setdefault(members, _Meeting(self, members))

    def fail(self, error: RankError) -> None:
        """Remember the first failure and wake everyone."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], late: Callable[[], RankError]) -> None:
        """With `changed` held: wait until ready(); the first failure, or late() after the time limit, is raised."""
        self.changed.wait_for(lambda: ready() or self.failure is not None, self.timeout)
        if ready():
            return
        if self.failure is None:
            self.failure = late()
            self.changed.notify_all()
        raise RankError(str(self.failure), self.failure.rank)


class _Meeting:
    """Where the members of a group meet again and again, each time with a name and a value."""

    def __init__(self, hub: Hub, members: tuple[int, ...]) -> None:
        self.hub, self.members = hub, members
        self.came: dict[int, tuple[str, Any]] = {}
        self.round, self.values = 0, []

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """Everyone's value, in the order of the members, when all have come."""
        with self.hub.changed:
            self.came[rank] = (what, value)
            mine = self.round
            if len(self.came) == len(self.members):
                self._agree()
                self.values = [self.came[member][1] for member in self.members]
                self.came, self.round = {}, mine + 1
                self.hub.changed.notify_all()
            self.hub.wait_for(lambda: self.round != mine, lambda: self._late(what))
            return self.values

    def _agree(self) -> None:
        names = {rank: what for rank, (what, _) in self.came.items()}
        first = names[self.members[0]]
        for rank, what in names.items():
            if what != first:
                error = RankError(f"rank {rank} is at {what!r} while rank {self.members[0]} is at {first!r}; "
                                  "all ranks must run the same steps", rank)
                self.hub.failure = self.hub.failure or error
                self.hub.changed.notify_all()
                raise error

    def _late(self, what: str) -> RankError:
        missing = [rank for rank in self.members if rank not in self.came]
        return RankError(f"rank {missing[0]} did not reach {what!r} within {self.hub.timeout:g} s; "
                         f"{len(self.came)} others wait there", missing[0])


class SimulatedGroup(Group):
    """`Group` among the threads of a `simulate`."""

    def __init__(self, hub: Hub, members: Sequence[int], rank: int) -> None:
        self._members, self._rank, self._hub = tuple(members), rank, hub
        super().__init__(self._members.index(rank), len(self._members))
        self._meeting = hub.meeting(self._members)

    def _all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        return _sum(self._meeting.meet(self._rank, what, x))

    def _all_gather(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        return torch.cat(self._meeting.meet(self._rank, what, x))

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        first = sum(counts[: self.index])
        parts = self._meeting.meet(self._rank, what, x)
        return _sum([part[first : first + counts[self.index]] for part in parts])

    def _all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int], what: str) -> torch.Tensor:
        sizes = self._meeting.meet(self._rank, f"{what}, sizes", torch.tensor(send))
        parts = self._meeting.meet(self._rank, what, x)
        mine = [part.split(size.tolist())[self.index] for part, size in zip(parts, sizes, strict=True)]
        if [part.shape[0] for part in mine] != receive:
            raise ValueError(f"{what}: {[part.shape[0] for part in mine]} rows arrived; {receive} are expected")
        return torch.cat(mine)

    def _send(self, x: torch.Tensor, to: int, what: str) -> Callable[[], None]:
        with self._hub.changed:
            self._hub.mail.setdefault((self._rank, self._members[to]), deque()).append(x.clone())
            self._hub.changed.notify_all()
        return lambda: None

    def _receive(self, out: torch.Tensor, source: int, what: str) -> None:
        sender = self._members[source]
        with self._hub.changed:
            box = self._hub.mail.setdefault((sender, self._rank), deque())
            self._hub.wait_for(lambda: bool(box), lambda: RankError(
                f"rank {sender} sent nothing for {what!r} within {self._hub.timeout:g} s", sender))
            out.copy_(box.popleft())


class SimulatedRanks:
    """One thread's view of a simulated world: its number, and the groups it belongs to."""

    def __init__(self, hub: Hub, rank: int, world: int) -> None:
        self.rank, self.world, self._hub = rank, world, hub
        self.device = torch.device("cpu")

    def group(self, members: Sequence[int]) -> Group:
        """The group of these ranks, of which this is one."""
        return Group() if len(members) == 1 else SimulatedGroup(self._hub, members, self.rank)

    def plan_groups(self, plan: Plan, first: int | None = None) -> PlanGroups | None:
        """This rank's groups of a plan whose ranks are `first` and those after it (None: all ranks of the world).

        None for a rank outside them. PlanError if the world has another size.
        """
        first = check_world(plan, first, self.world)
        if not first <= self.rank < first + plan.world:
            return None
        place = place_of(plan, self.rank - first)
        tensor = [first + place.dp * plan.tp + n for n in range(plan.tp)]
        data = [first + n * plan.tp + place.tp for n in range(plan.dp)]
        world = range(first, first + plan.world)
        return PlanGroups(plan, place, self.group(tensor), self.group(data), self.group(world))

    def agree(self, what: str, value: str) -> None:
        """RankError, naming the rank, unless all ranks give the same value."""
        found = self._hub.meeting(tuple(range(self.world))).meet(self.rank, what, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RankError(f"{what} is {other!r} on rank {rank} and {found[0]!r} on rank 0; "
                                "all ranks must be given the same", rank)


def simulate(
    world: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Call function(ranks, *arguments) in `world` threads and return what each returned, by rank.

    timeout: seconds that a rank is waited for at an exchange. RankError names the first rank that failed; its own
    exception is the cause.
    """
    hub, results = Hub(timeout), [None] * world
    causes: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(SimulatedRanks(hub, rank, world), *arguments)
        except BaseException as error:
            causes[rank] = error
            hub.fail(error if isinstance(error, RankError) else RankError(f"rank {rank} failed: {error}", rank))

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        _join(thread, hub)
    if hub.failure is not None:
        cause = causes.get(hub.failure.rank)
        raise hub.failure from (None if cause is hub.failure else cause)
    return results


def _join(thread: threading.Thread, hub: Hub) -> None:
    """Wait for a thread; once the world has failed only as long as a rank is waited for, since it may hang."""
    while thread.is_alive():
        thread.join(hub.timeout if hub.failure is not None else 0.1)
        if thread.is_alive() and hub.failure is not None:
            return


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(parts[0].dtype, torch.float32) if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
