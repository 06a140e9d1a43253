"""The all-reduce kernels in the interpreter: ordinary tensors stand for the peers' memory, rank after rank.

The meeting cannot be waited for here, since one rank runs at a time: its own flags are set beforehand as if all peers
had come, and what it must have raised at the peers is checked afterwards.
"""
import pytest
import torch

from gptoss_kernels.comm import all_reduce_norm, symmetric
from gptoss_kernels.comm.symmetric import PROGRAMS, launch


class World:
    """The shared memory of `world` ranks: parts, sums, flags; and each rank's residual, results, meetings."""

    def __init__(self, world, rows, hidden, dtype, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.world, self.rows = world, rows
        self.parts = [torch.randn(rows, hidden, generator=g).to(dtype) for _ in range(world)]
        self.sums = [torch.full((rows, hidden), torch.nan, dtype=dtype) for _ in range(world)]
        self.flags = [torch.zeros(PROGRAMS, world, dtype=torch.int32) for _ in range(world)]
        self.meetings = [torch.zeros(PROGRAMS, dtype=torch.int32) for _ in range(world)]
        self.residual = torch.randn(rows, hidden, generator=g).to(dtype)
        self.weight = 1 + 0.2 * torch.randn(hidden, generator=g)
        self.normed = [torch.full((rows, hidden), torch.nan, dtype=dtype) for _ in range(world)]

    def run(self, rank, form, programs=PROGRAMS, waiting_for=1000, part=None, norm=True, residual=None):
        """One rank's launch, its peers having raised their flags to `waiting_for`."""
        self.flags[rank].fill_(waiting_for)
        address = [torch.tensor([t.data_ptr() for t in shared]) for shared in (self.parts, self.sums, self.flags)]
        launch(form, parts=address[0], sums=address[1], flags=address[2], meetings=self.meetings[rank],
               own_sum=self.sums[rank], residual=self.residual if residual is None else residual,
               weight=self.weight if norm else None, normed=self.normed[rank] if norm else None, rank=rank,
               world=self.world, programs=programs, part=part)


CASES = [(2, 1, 64), (2, 8, 192), (2, 5, 2880), (3, 7, 96), (4, 4, 160), (8, 11, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("world", "rows", "hidden"), CASES)
def test_one_shot(world, rows, hidden, dtype):
    at = World(world, rows, hidden, dtype)
    summed, normed = all_reduce_norm(at.parts, at.residual, at.weight)
    for rank in range(world):
        at.run(rank, "one_shot", programs=4)
        assert torch.equal(at.sums[rank], summed)
        close(at.normed[rank], normed)
        assert at.meetings[rank].tolist() == [1] * min(4, rows) + [0] * (PROGRAMS - min(4, rows))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("rows", [6, 7, 9])
def test_two_rows_of_a_program_at_once(monkeypatch, rows, copied):
    """Every row is read from where it was handed in by the same program of the other rank."""
    monkeypatch.setattr(symmetric, "rows_of_a_program", lambda rows, world: 2)
    at = World(2, rows, 96, torch.bfloat16)
    given = [part.clone() for part in at.parts]
    summed, normed = all_reduce_norm(at.parts, at.residual, at.weight)
    if copied:
        for part in at.parts:
            part.fill_(torch.nan)
    for rank in (0, 1, 0):
        at.run(rank, "one_shot", programs=3, part=given[rank] if copied else None)
    for rank in range(2):
        assert torch.equal(at.parts[rank], given[rank])
    assert torch.equal(at.sums[0], summed) and torch.equal(at.sums[1], summed)
    close(at.normed[0], normed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("world", "rows", "hidden"), CASES)
def test_two_shot(world, rows, hidden, dtype):
    """First every rank stores its rows everywhere; a second round finds all sums and norms them."""
    at = World(world, rows, hidden, dtype)
    summed, normed = all_reduce_norm(at.parts, at.residual, at.weight)
    for rank in range(world):
        at.run(rank, "two_shot", programs=3)
        own = slice(rank, None, world)
        for peer in range(world):
            assert torch.equal(at.sums[peer][own], summed[own]), "each rank's rows are stored at every peer"
        later = [row for row in range(rows) if row % world > rank]
        assert torch.isnan(at.sums[rank][later].float()).all(), "rows of ranks that have not run are not ours to add"
    for rank in range(world):
        at.run(rank, "two_shot", programs=3)
        assert torch.equal(at.sums[rank], summed)
        close(at.normed[rank], normed)


@pytest.mark.parametrize(("form", "meetings"), [("one_shot", 1), ("two_shot", 2)])
def test_flags_that_are_raised(form, meetings):
    """Each program raises its own flag at every peer, to the number of the last meeting, and counts on in a replay."""
    at = World(3, 6, 64, torch.float32)
    for replay in (1, 2, 3):
        at.run(1, form, programs=2)
        programs = 2
        for peer in (0, 2):
            raised = at.flags[peer][:, 1].tolist()
            assert raised == [replay * meetings] * programs + [0] * (PROGRAMS - programs)
            assert not at.flags[peer][:, [0, 2]].any()
        assert at.meetings[1][:programs].tolist() == [replay * meetings] * programs


@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
@pytest.mark.parametrize(("world", "rows", "hidden"), CASES)
def test_a_part_from_ordinary_memory(form, world, rows, hidden):
    """Each rank's part is copied into its shared memory, all rows of it, before the rank says that it has come."""
    at = World(world, rows, hidden, torch.bfloat16)
    given, summed = [part.clone() for part in at.parts], all_reduce_norm(at.parts, at.residual, at.weight)[0]
    for part in at.parts:
        part.fill_(torch.nan)
    for _ in range(2):                              # the first round hands in, the second finds everyone's part
        for rank in range(world):
            at.run(rank, form, programs=3, part=given[rank])
            assert torch.equal(at.parts[rank], given[rank])
    if form == "two_shot":
        at.run(0, form, programs=3)
    assert torch.equal(at.sums[0], summed)


@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
def test_without_a_norm(form):
    at = World(2, 7, 96, torch.float32)
    summed, _ = all_reduce_norm(at.parts, at.residual, at.weight)
    for rank in (0, 1, 0):
        at.run(rank, form, programs=3, norm=False)
    assert torch.equal(at.sums[0], summed) and torch.isnan(at.normed[0]).all()


def test_the_residual_may_be_the_last_sum():
    """Two-shot: the residual lies where the sum goes, at every rank; each row is read before it is overwritten."""
    at = World(3, 8, 64, torch.float32)
    summed, _ = all_reduce_norm(at.parts, at.residual, at.weight)
    for rank in range(3):
        at.sums[rank].copy_(at.residual)
    for rank in range(3):
        at.run(rank, "two_shot", programs=2, norm=False, residual=at.sums[rank])
    for rank in range(3):
        assert torch.equal(at.sums[rank], summed)


def test_a_missing_part_shows():
    """The check can fail: with one rank's part changed the sum is another one."""
    at = World(2, 4, 64, torch.float32)
    summed, _ = all_reduce_norm(at.parts, at.residual, at.weight)
    at.parts[1][2] += 1
    at.run(0, "one_shot")
    assert torch.equal(at.sums[0][[0, 1, 3]], summed[[0, 1, 3]]) and not torch.equal(at.sums[0][2], summed[2])


def close(got, want):
    """The norm's own rounding: one step of the format, at most."""
    step = 2**-7 if got.dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(got.float(), want.float(), rtol=step, atol=step)
