"""Splitting tokens: every token once, work balanced, and only the rows that a layer sees travel."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import TOLERANCE, distance, load, one_rank, run, small_nano, tokens

from gptoss_lab.parallel import Plan, sequence, simulate
from gptoss_lab.parallel.sequence import SequenceSplit, split_tokens


@given(st.lists(st.integers(1, 60), min_size=0, max_size=6), st.integers(1, 8))
def test_every_token_once(lengths, ranks):
    segments = split_tokens(lengths, ranks)
    found = [(s.sequence, t) for own in segments for s in own for t in range(s.start, s.stop)]
    assert sorted(found) == [(b, t) for b, n in enumerate(lengths) for t in range(n)]
    assert all(len([s for s in own if s.sequence == b]) <= 2 for own in segments for b in range(len(lengths)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_even(ranks):
    """Query-key pairs of a full layer: the busiest rank has hardly more than the mean; cut in order it would have
    nearly twice as many."""
    length = 4096
    work = [sum((s.start + 1 + s.stop) * (s.stop - s.start) / 2 for s in own) for own in split_tokens([length], ranks)]
    assert max(work) / (sum(work) / ranks) < 1.001
    last = length // ranks
    in_order = (2 * length - last + 1) * last / 2
    assert in_order / (sum(work) / ranks) > 1.45


def test_short_sequences_take_turns():
    """A batch in decode: one token each, dealt out like cards."""
    assert [[s.sequence for s in own] for own in split_tokens([1] * 6, 4)] == [[0, 4], [1, 5], [2], [3]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([2, 3, 4]), st.integers(1, 12),
       st.booleans())
def test_exactly_the_visible_rows_arrive(lengths, ranks, window, keep):
    """Rows carry their number: what arrived is what the segments see and the caches keep, and nothing else."""
    total = sum(lengths)
    numbers = torch.arange(total, dtype=torch.float64)[:, None]

    def own(place):
        split = SequenceSplit(lengths, place.group(range(ranks)), keep)
        rows = numbers[split.rows]
        return split, split.move(rows, window, "halo"), split.move(rows, None, "all"), split.last(rows), split.all(rows)

    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    for rank, (split, halo, full, last, everything) in enumerate(simulate(ranks, own)):
        assert torch.equal(full, numbers) and torch.equal(everything, numbers)
        assert last.flatten().tolist() == [start + n - 1 for start, n in zip(starts, lengths, strict=True)]
        seen = {starts[s.sequence] + t for s in split.segments[rank]
                for t in range(max(0, s.start - window + 1), s.stop)}
        if keep:
            kept = [range(start + max(0, n - window + 1), start + n) for start, n in zip(starts, lengths, strict=True)]
            seen |= {row for rows in kept for row in rows}
        arrived = {row for row in range(total) if halo[row].item() == row and (row or 0 in seen)}
        assert arrived == seen


def test_rows_that_did_not_travel_are_not_used(small, monkeypatch):
    """With NaN in their place the logits are the same: attention and caches read only what arrived."""
    monkeypatch.setattr(sequence, "UNSENT", torch.nan)
    config = small_nano()
    sequences = [tokens(config, 200, seed=1), tokens(config, 3, seed=2), tokens(config, 64, seed=3)]
    expected = one_rank(small, sequences)
    for found in simulate(4, lambda ranks: run(load(small, ranks, Plan(2, 1, 4, True)), sequences)):
        assert distance(found, expected) <= TOLERANCE


def test_halo_does_not_grow_with_the_prompt(small):
    """Bytes of keys and values in the sliding layers alone: the same for 512 and 2048 tokens."""
    def halo(length):
        def moved(place):
            split = SequenceSplit([length], place.group(range(4)), keep=True)
            split.move(torch.zeros(len(split.rows), 4, 64), 16, "halo")
            return split.group.traffic.received["halo"]
        return simulate(4, moved)

    row = 4 * 64 * 4
    assert halo(512) == halo(2048)
    assert max(halo(512)) <= 3 * 15 * row
