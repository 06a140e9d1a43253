"""Own rows summed, normed and handed out in e4m3, in the interpreter: ordinary tensors stand for the peers' memory,
rank after rank, with the flags set beforehand as if all peers had come (as in test_comm_interpreted.py)."""
import pytest
import torch

from gptoss_kernels.comm import own_ranges, own_rows
from gptoss_kernels.comm.own_rows import PROGRAMS, launch_hand_out, launch_sum_rows
from gptoss_kernels.comm.reference import sum_own_rows
from gptoss_kernels.reference.quant import dequantise_groups

NOTHING = 0x7F                                          # of a code: NaN
MANY = own_rows.sum_rows_config                         # of many rows


@pytest.fixture(autouse=True)
def rows_at_once(monkeypatch):
    """Few rows are taken in the blocks that many have."""
    monkeypatch.setattr(own_rows, "sum_rows_config", lambda rows, world: MANY(4096, world))


class World:
    """The shared memory of `world` ranks, poisoned, and what each rank has for itself."""

    def __init__(self, world, tokens, hidden, dtype=torch.bfloat16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.world, self.tokens, self.own = world, tokens, own_ranges(tokens, world)
        self.padded, groups = -(-tokens // 128) * 128, -(-hidden // 128)
        self.parts = [torch.randn(tokens, hidden, generator=g).to(dtype) for _ in range(world)]
        self.residual, self.weight = torch.randn(tokens, hidden, generator=g).to(dtype), torch.rand(hidden, generator=g)
        self.values = [torch.full((self.padded, hidden), NOTHING, dtype=torch.uint8) for _ in range(world)]
        self.scales = [torch.full((groups, self.padded), torch.nan) for _ in range(world)]
        self.sums = [torch.full((len(own), hidden), torch.nan, dtype=dtype) for own in self.own]
        self.flags = [torch.zeros(PROGRAMS, world, dtype=torch.int32) for _ in range(world)]
        self.meetings = [torch.zeros(PROGRAMS, dtype=torch.int32) for _ in range(world)]

    def run(self, rank, norm=True, meet=True, programs=3):
        self.flags[rank].fill_(1000)
        own = self.own[rank]
        launch_sum_rows(
            parts=addresses(self.parts), values=addresses(self.values), scales=addresses(self.scales),
            flags=addresses(self.flags), meetings=self.meetings[rank],
            residual=self.residual[own.start : own.stop], weight=self.weight if norm else None,
            own_sum=self.sums[rank], tokens=self.tokens, scale_stride=self.padded, rank=rank, world=self.world,
            meet=meet, programs=programs)


def addresses(shared):
    return torch.tensor([t.data_ptr() for t in shared])


CASES = [(2, 8, 128), (2, 37, 192), (2, 5, 2880), (2, 16, 2880), (4, 61, 320), (4, 9, 1100), (8, 70, 64), (3, 25, 96)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("world", "tokens", "hidden"), CASES)
def test_everyone_has_all_rows(world, tokens, hidden, dtype):
    """Sums have the reference's bits; codes and scales are the same on all ranks, and the reference's but for a value
    on the edge of two codes. Nothing is written beyond the rows, nor before a rank has run."""
    at = World(world, tokens, hidden, dtype)
    summed, codes, scale = sum_own_rows(at.parts, at.residual, at.weight)
    for rank, own in enumerate(at.own):
        at.run(rank)
        assert torch.equal(at.sums[rank], summed[own.start : own.stop])
        later = slice(own.stop, None)
        for peer in range(world):
            assert (at.values[peer][later] == NOTHING).all() and at.scales[peer][:, later].isnan().all()
    found = at.values[0].view(torch.float8_e4m3fn)[:tokens], at.scales[0].t()[:tokens]
    for peer in range(1, world):
        assert torch.equal(at.values[peer], at.values[0])
        assert torch.equal(at.scales[peer][:, :tokens], at.scales[0][:, :tokens])
    step = 2**-7 if dtype == torch.bfloat16 else 1e-5                    # of the norm's own rounding
    assert torch.allclose(found[1], scale, rtol=step)
    apart = (found[0].view(torch.uint8).int() - codes.view(torch.uint8).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < (0.02 if dtype == torch.bfloat16 else 1e-3)
    exact = dequantise_groups(codes, scale)
    assert (dequantise_groups(*found) - exact).norm() <= 0.01 * exact.norm()


def test_rows_of_a_program():
    """Four for many rows of two ranks; fewer for more ranks, and where some programs would have none."""
    assert [MANY(rows, 2)["ROWS"] for rows in (8, 511, 512, 1023, 1024, 4096)] == [1, 1, 2, 2, 2, 2]
    assert [MANY(4096, world)["ROWS"] for world in (2, 3, 4, 8)] == [2, 1, 1, 1]


@pytest.mark.parametrize("rows", [1, 2])
def test_other_blocks_give_the_same(monkeypatch, rows):
    one, other = World(2, 37, 192), World(2, 37, 192)
    for rank in range(2):
        one.run(rank)
    monkeypatch.setattr(own_rows, "sum_rows_config", lambda *_: MANY(4096, 2) | {"ROWS": rows})
    for rank in range(2):
        other.run(rank)
        assert torch.equal(one.sums[rank], other.sums[rank])
    for rank in range(2):                               # but for the order in which a row's squares are summed
        assert (one.values[rank] != other.values[rank]).float().mean() < 0.01
        assert torch.allclose(one.scales[rank][:, :37], other.scales[rank][:, :37], rtol=2**-7)


@pytest.mark.parametrize("meet", [True, False])
def test_meetings(meet):
    """Every program raises its flag at every peer once or twice, whether it has rows or none."""
    at = World(3, 20, 64)                                                # 8, 8 and 4 rows
    for call in (1, 2, 3):
        for rank in range(3):
            at.flags = [torch.zeros_like(flags) for flags in at.flags]
            at.run(rank, meet=meet, programs=2)
            number = call * (2 if meet else 1)
            for peer in {0, 1, 2} - {rank}:
                assert at.flags[peer][:, rank].tolist() == [number] * 2 + [0] * (PROGRAMS - 2)
            assert at.meetings[rank][:3].tolist() == [number, number, 0]


def test_the_last_sum_hands_nothing_out():
    at = World(2, 21, 192)
    summed, _, _ = sum_own_rows(at.parts, at.residual, at.weight)
    for rank in range(2):
        at.run(rank, norm=False)
    assert torch.equal(torch.cat(at.sums), summed)
    assert all((values == NOTHING).all() for values in at.values) and all(s.isnan().all() for s in at.scales)


def test_a_missing_part_shows():
    at = World(2, 16, 128)
    summed, _, _ = sum_own_rows(at.parts, at.residual, at.weight)
    at.parts[1][2] += 1
    at.run(0)
    rows = [0, 1, *range(3, 8)]
    assert torch.equal(at.sums[0][rows], summed[rows]) and not torch.equal(at.sums[0][2], summed[2])


@pytest.mark.parametrize(("world", "tokens", "top"), [(2, 700, 4), (2, 3, 4), (4, 61, 2), (3, 25, 1)])
def test_hand_out(world, tokens, top):
    own = own_ranges(tokens, world)
    ids = torch.randint(0, 128, (tokens, top), dtype=torch.int32)
    weights = torch.rand(tokens, top)
    to_ids = [torch.full((tokens + 3, top), -7, dtype=torch.int32) for _ in range(world)]
    to_weights = [torch.full((tokens + 3, top), torch.nan) for _ in range(world)]
    flags = [torch.zeros(PROGRAMS, world, dtype=torch.int32) for _ in range(world)]
    for rank in range(world):
        flags[rank].fill_(1000)
        rows = slice(own[rank].start, own[rank].stop)
        launch_hand_out(ids=ids[rows].contiguous(), weights=weights[rows].contiguous(), to_ids=addresses(to_ids),
                        to_weights=addresses(to_weights), flags=addresses(flags),
                        meetings=torch.zeros(PROGRAMS, dtype=torch.int32), tokens=tokens, rank=rank, world=world)
        assert (flags[rank - 1][0, rank] == 1) if world > 1 else True
    for rank in range(world):
        assert torch.equal(to_ids[rank][:tokens], ids) and (to_ids[rank][tokens:] == -7).all()
        assert torch.equal(to_weights[rank][:tokens], weights) and to_weights[rank][tokens:].isnan().all()
