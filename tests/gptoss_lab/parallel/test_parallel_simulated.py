"""Simulated ranks: exchanges by their definition, and failures that name a rank instead of waiting for ever."""
import threading
import time

import pytest
import torch

from gptoss_lab.parallel import Plan, PlanError, RankError, simulate
from gptoss_lab.parallel.groups import Group


def exchange(own, what):
    group = own.group(range(own.world))
    n, rank = own.world, own.rank
    counts = [r + 1 for r in range(n)]
    mine = torch.full((rank + 1, 2), float(rank))
    if what == "all_reduce":
        return group.all_reduce(torch.full((3,), float(rank + 1)), "x")
    if what == "all_gather":
        return group.all_gather(mine, counts, "x")
    if what == "reduce_scatter":
        return group.reduce_scatter(torch.arange(sum(counts)).float() * (rank + 1), counts, "x")
    parts = [torch.full((to,), 10 * rank + to) for to in range(n)]
    return group.all_to_all(torch.cat(parts), list(range(n)), [rank] * n, "x")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges(world):
    for found in simulate(world, exchange, "all_reduce"):
        assert found.tolist() == [world * (world + 1) / 2] * 3
    for found in simulate(world, exchange, "all_gather"):
        assert found[:, 0].tolist() == [r for r in range(world) for _ in range(r + 1)]
    start = 0
    for rank, found in enumerate(simulate(world, exchange, "reduce_scatter")):
        rows = torch.arange(start, start + rank + 1) * (world * (world + 1) / 2)
        assert torch.equal(found, rows.float())
        start += rank + 1
    for rank, found in enumerate(simulate(world, exchange, "all_to_all")):
        assert found.tolist() == [10 * source + rank for source in range(world) for _ in range(rank)]


def test_ranks_without_rows_take_part():
    def own(place):
        group = place.group(range(3))
        rows = torch.ones(2 * (place.rank == 1), 4)
        everyone = group.all_gather(rows, [0, 2, 0], "x")
        return everyone.shape, group.reduce_scatter(torch.ones(2, 4), [0, 2, 0], "y").shape

    assert [tuple(a) + tuple(b) for a, b in simulate(3, own)] == [(2, 4, 0, 4), (2, 4, 2, 4), (2, 4, 0, 4)]


def test_sums_are_the_same_bits_everywhere():
    parts = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = simulate(8, lambda own: own.group(range(8)).all_reduce(parts[own.rank], "x"))
    assert all(torch.equal(found[0], f) for f in found)
    assert torch.equal(found[0], parts.float().sum(dim=0).bfloat16())


def test_send_and_receive_in_order():
    def own(place):
        group = place.group(range(2))
        if place.rank == 0:
            for n in range(3):
                group.send(torch.tensor([n]), 1, "x")
            return None
        return [group.receive(torch.empty(1, dtype=torch.int64), 0, "x").item() for _ in range(3)]

    assert simulate(2, own)[1] == [0, 1, 2]


def test_alone_nothing_moves():
    group = Group()
    x = torch.ones(3, 2)
    assert group.all_reduce(x, "x") is x and group.all_gather(x, [3], "x") is x
    assert group.reduce_scatter(x, [3], "x") is x and group.all_to_all(x, [3], [3], "x") is x
    assert not group.traffic.calls


def test_wrong_number_of_rows():
    with pytest.raises(ValueError, match="combine: 3 rows were given; 4 are expected"):
        Group().all_gather(torch.ones(3, 2), [4], "combine")


def test_a_rank_that_raises_is_named():
    def own(place):
        if place.rank == 2:
            raise ArithmeticError("no more numbers")
        place.group(range(4)).all_reduce(torch.ones(1), "sum")

    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 2 failed: no more numbers") as error:
        simulate(4, own)
    assert error.value.rank == 2 and isinstance(error.value.__cause__, ArithmeticError)
    assert time.monotonic() - begin < 5


def test_a_rank_that_does_not_come_is_named():
    stop = threading.Event()

    def own(place):
        if place.rank == 1:
            stop.wait(20)
            return
        place.group(range(3)).all_reduce(torch.ones(1), "sum")

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 did not reach 'sum' within 0.5 s; 2 others wait") as error:
        simulate(3, own, timeout=0.5)
    stop.set()
    assert error.value.rank == 1 and time.monotonic() - begin < 5


def test_ranks_that_lost_step():
    def own(place):
        place.group(range(2)).all_reduce(torch.ones(1), "attention" if place.rank else "combine")

    with pytest.raises(RankError, match="all ranks must run the same steps"):
        simulate(2, own)


def test_mismatched_plans_are_named():
    def own(place):
        place.agree("plan", str(Plan(2, 1, 2) if place.rank != 1 else Plan(1, 1, 2)))

    with pytest.raises(RankError, match="plan is 'EP1 DP1 TP2' on rank 1 and 'EP2 DP1 TP2' on rank 0"):
        simulate(2, own)


@pytest.mark.parametrize("first", [None, 1])
def test_wrong_world_size(first):
    with pytest.raises(RankError, match=r"EP1 DP1 TP4 (has 4 ranks; 2 were started|needs 4 ranks)") as error:
        simulate(2, lambda own: own.plan_groups(Plan(1, 1, 4), first))
    assert isinstance(error.value.__cause__, PlanError)
