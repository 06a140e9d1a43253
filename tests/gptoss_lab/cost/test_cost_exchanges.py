"""What ranks exchange: bytes by hand, bytes that the engine counts itself, and the engine's own conditions."""
import itertools

import numpy as np
import pytest
import torch

from gptoss_lab import parallel
from gptoss_lab.config import preset
from gptoss_lab.cost import FP8_EXPERTS, RELEASED, SERVED, Plan, decode, expected_distinct_experts, prefill, verify
from gptoss_lab.cost import exchanges as ex
from gptoss_lab.cost.experts import expected_fullest_experts
from gptoss_lab.model.fast import own_rows as engine
from gptoss_lab.parallel.own_rows import OwnRows
from gptoss_lab.parallel.simulated import simulate
from gptoss_lab.parallel.traffic import exchanges

BIG, SMALL = preset("gpt-oss-120b"), preset("gpt-oss-20b")


# -- which sums --------------------------------------------------------------------------------------------------------
def test_own_rows_begin_where_the_engine_begins():
    assert ex.OWN_ROWS == engine.LEAST_ROWS


@pytest.mark.parametrize(("plan", "precision", "rows", "own"), [
    (Plan(2, 1, 2), SERVED, 1024, True), (Plan(1, 1, 8), SERVED, 8192, True), (Plan(2, 1, 2), SERVED, 1023, False),
    (Plan(), SERVED, 8192, False), (Plan(2, 2, 1), SERVED, 8192, False), (Plan(4, 2, 2), SERVED, 8192, False),
    (Plan(2, 1, 2), FP8_EXPERTS, 8192, False), (Plan(2, 1, 2), RELEASED, 8192, False),
])
def test_own_rows_need_ranks_of_one_group_e4m3_and_a_long_prompt(plan, precision, rows, own):
    assert ex.keeps_own_rows(plan, precision, rows) == own


# -- bytes -------------------------------------------------------------------------------------------------------------
def test_sums_of_a_prompt_of_8192_between_two_ranks_by_hand():
    """36 layers, two sums each. Whole rows: 8192 of 5760 bytes. Own rows: 4096 of 5760 bytes of the other's part, then
    4096 of 2880 codes and 23 scales, but after the last sum, and for 4 experts of each an id and a weight."""
    plan = Plan(2, 1, 2)
    whole = 72 * 8192 * 5760
    own = 72 * 4096 * 5760 + 71 * 4096 * (2880 + 4 * 23) + 36 * 4096 * 4 * (4 + 4)
    assert ex.sum_bytes(BIG, plan, 8192, own=False) == whole and ex.sum_bytes(BIG, plan, 8192, own=True) == own
    assert 0.75 < own / whole < 0.76
    assert ex.sum_count(BIG, plan, False) == 72 and ex.sum_count(BIG, plan, True) == 108


def test_sums_over_four_ranks_by_hand():
    plan = Plan(4, 1, 4)
    assert ex.sum_bytes(SMALL, plan, 10, own=False) == pytest.approx(48 * 1.5 * 10 * 5760)
    assert ex.one_shot_bytes(SMALL, plan, 10) == 48 * 3 * 10 * 5760
    own = 48 * 6144 * 5760 + 47 * 6144 * 2972 + 24 * 6144 * 32                      # three quarters of 8192 rows
    assert ex.sum_bytes(SMALL, plan, 8192, own=True) == pytest.approx(own)


def test_gathers_by_hand():
    """Two groups of four ranks, 4 rows each: those of the other group come, and its part of the own ones."""
    assert ex.gather_bytes(BIG, Plan(8, 2, 4), 4) == 36 * (4 + 4) * 5760
    assert ex.gather_count(BIG, Plan(8, 2, 4)) == 72 and ex.gather_count(BIG, Plan(8, 1, 8)) == 0
    assert ex.gather_bytes(SMALL, Plan(4, 4, 1), 100) == 24 * 2 * 300 * 5760


def test_one_rank_exchanges_nothing():
    one = Plan()
    assert ex.sum_bytes(BIG, one, 8192, False) == ex.gather_bytes(BIG, one, 8192) == ex.one_shot_bytes(BIG, one, 9) == 0
    assert ex.sum_count(BIG, one, False) == ex.gather_count(BIG, one) == 0


@pytest.mark.parametrize("plan", [(2, 1, 2), (4, 1, 4), (2, 2, 1), (4, 2, 2), (4, 4, 1)], ids=str)
def test_bytes_are_those_that_the_parallel_floor_lists(plan):
    """Whole rows and gathers, as traffic.py has them, which is compared with the running engine."""
    listed = dict.fromkeys(("tp", "dp"), 0.0)
    for exchange in exchanges(BIG, parallel.Plan(*plan), fast=True):
        listed[exchange.axis] += exchange.step_bytes * 100
    assert ex.sum_bytes(BIG, Plan(*plan), 100, own=False) == pytest.approx(listed["tp"])
    assert ex.gather_bytes(BIG, Plan(*plan), 100) == pytest.approx(listed["dp"])


@pytest.mark.parametrize("world", [2, 4])
def test_own_rows_receive_what_the_engine_counts(world):
    """One sum that is handed out, and one that is not, of 64 rows over simulated ranks."""
    def received(ranks):
        group = ranks.group(range(world))
        own = OwnRows(group, None, 4)
        part = torch.zeros(64, 2880, dtype=torch.bfloat16)
        mine = own.own(64)
        for what, norm in (("handed out", torch.ones(2880)), ("kept", None)):
            own.sum(part, part[mine.start : mine.stop], what, norm)
        return [group.traffic.received[what] for what in ("handed out", "kept")]

    for counted in simulate(world, received):
        assert counted == [ex.own_sum_bytes(2880, world, 64), ex.own_sum_bytes(2880, world, 64, handed_out=False)]


# -- rows --------------------------------------------------------------------------------------------------------------
def test_rows_that_are_normed():
    """37 norms of the own group's rows and 36 of everyone's; of own rows a rank's share."""
    assert ex.normed_rows(BIG, Plan(), 100, 100, False) == 73 * 100
    assert ex.normed_rows(BIG, Plan(2, 2, 1), 100, 200, False) == 37 * 100 + 36 * 200
    assert ex.normed_rows(BIG, Plan(2, 1, 2), 100, 100, True) == 73 * 50


def test_a_decode_step_has_as_many_rows_in_every_group():
    two = Plan(2, 2, 1)
    assert [ex.stepped(decode(100, batch), two).sequences for batch in (1, 2, 3, 8)] == [2, 2, 4, 8]
    assert ex.stepped(verify(100, 3, batch=1), two).sequences == 2
    assert ex.stepped(decode(100, 5), Plan(2, 1, 2)).sequences == 5
    assert ex.stepped(prefill(100, 1), two) == prefill(100, 1)


# -- the fullest rank --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("groups", "tokens"), [(2, 1), (2, 8), (2, 32), (4, 8), (8, 8), (8, 128)])
def test_the_fullest_group_is_that_of_random_picks(groups, tokens):
    rng, each = np.random.default_rng(0), BIG.num_experts // groups
    most = []
    for _ in range(2000):
        keys = rng.random((tokens, BIG.num_experts))
        touched = np.unique(np.argpartition(keys, BIG.experts_per_token, axis=1)[:, : BIG.experts_per_token])
        most.append(np.bincount(touched // each, minlength=groups).max())
    assert expected_fullest_experts(BIG, tokens, groups) == pytest.approx(np.mean(most), rel=0.05)


def test_one_token_on_two_groups_by_counting():
    """4 picks among 64 + 64: the sizes of the fuller side, with their numbers of choices."""
    ways = {n: 0 for n in range(5)}
    for side in itertools.product((0, 1), repeat=4):
        ways[max(sum(side), 4 - sum(side))] += 1
    nearly = sum(n * count for n, count in ways.items()) / 16                # 2.75; sides are even odds for each
    assert expected_fullest_experts(BIG, 1, 2) == pytest.approx(nearly, rel=0.02)


def test_one_group_has_all_and_with_many_tokens_all_are_full():
    assert expected_fullest_experts(SMALL, 8, 1) == expected_distinct_experts(SMALL, 8)
    assert expected_fullest_experts(BIG, 8192, 4) == pytest.approx(32)
