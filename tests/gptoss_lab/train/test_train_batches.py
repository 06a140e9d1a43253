"""Batches: fixed size, a function of their number, dialogues apart, the right places learned."""
import itertools
import random

import numpy as np
import pytest

from gptoss_lab.train.batches import make_batch, pack, stream
from gptoss_lab.train.dialogues.render import Rendered
from gptoss_lab.train.vocabulary import Vocabulary

KEPT = Vocabulary(range(0, 200_000, 2))


def equal(a, b):
    return a.offsets == b.offsets and all(
        np.array_equal(getattr(a, n), getattr(b, n)) for n in ("rows", "positions", "learned"))


def test_a_batch_is_full_and_a_function_of_its_number():
    batch = make_batch(3, 0, 2_048, KEPT, 131_072)
    assert len(batch.rows) == len(batch.positions) == len(batch.learned) == batch.offsets[-1] == 2_048
    assert equal(batch, make_batch(3, 0, 2_048, KEPT, 131_072))
    assert not equal(batch, make_batch(4, 0, 2_048, KEPT, 131_072))
    assert not equal(batch, make_batch(3, 1, 2_048, KEPT, 131_072))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_at_any_number(workers):
    found = list(itertools.islice(stream(0, 1_024, KEPT, 131_072, first=5, workers=workers), 3))
    assert all(equal(b, make_batch(5 + i, 0, 1_024, KEPT, 131_072)) for i, b in enumerate(found))


def test_places_stay_inside_a_dialogue():
    batch = pack([Rendered([0, 2, 4, 6], [False, True, False, True]), Rendered([8, 10], [True, True])], KEPT)
    assert batch.places(1).tolist() == [0, 2, 4] and batch.places(2).tolist() == [1] and batch.places(3).tolist() == [0]


def test_a_token_without_a_row_is_not_learned():
    batch = pack([Rendered([0, 1, 2], [False, True, True])], KEPT)
    assert batch.rows.tolist() == [0, KEPT.shared, 1] and batch.places().tolist() == [1]


def test_some_dialogues_begin_far_out_and_none_beyond_the_end():
    starts = []
    for number in range(12):
        batch = make_batch(number, 0, 8_192, KEPT, 131_072)
        starts += [int(batch.positions[a]) for a in batch.offsets[:-1]]
        assert batch.positions.max() < 131_072
    far = [s for s in starts if s]
    assert 0.04 < len(far) / len(starts) < 0.2 and max(far) > 65_536


def test_what_does_not_fit_is_left_out_and_the_rest_is_padding():
    def long_one(rng: random.Random) -> Rendered:
        return Rendered([2] * 60, [True] * 60)

    batch = make_batch(0, 0, 100, KEPT, 1_000, long_one)
    assert batch.offsets == [0, 60, 100] and not batch.learned[60:].any()
