"""The compact vocabulary: complete for what is learned, and exact in the softmax."""
import random

import numpy as np
import pytest

from gptoss_lab.harmony import encode
from gptoss_lab.train.dialogues import render_dialogue, training_dialogue
from gptoss_lab.train.vocabulary import Vocabulary, training_vocabulary


@pytest.fixture(scope="module")
def kept():
    return training_vocabulary(6_000)


def test_it_is_small_enough_to_ship_and_the_same_every_time(kept):
    assert 1_200 < kept.shared < 2_400
    assert np.array_equal(training_vocabulary(6_000).token_ids, kept.token_ids)


def test_every_learned_token_has_a_row(kept):
    rng = random.Random(77)
    for _ in range(1_000):
        rendered = render_dialogue(training_dialogue(rng), rng)
        rows = kept.compact(rendered.ids)
        missing = [i for i, row, yes in zip(rendered.ids, rows, rendered.learned, strict=True)
                   if yes and row == kept.shared]
        assert not missing


def test_numbers_up_to_three_digits_have_rows(kept):
    for text in ("0", "7", "42", "00", "09", "007", "999", "137 + 488"):
        assert kept.shared not in kept.compact(encode(text))


def test_there_and_back(kept):
    ids = encode("What is 37 + 48?")
    assert kept.full(kept.compact(ids)) == ids
    assert kept.rows == kept.shared + 1 and kept.others == 201_088 - kept.shared


def test_bad_input():
    kept = Vocabulary([3, 1, 3], 10)
    assert kept.token_ids.tolist() == [1, 3] and kept.compact([0, 1, 3, 9]).tolist() == [2, 0, 1, 2]
    with pytest.raises(ValueError, match="row 2 is the shared one"):
        kept.full([0, 2])
    for ids in ([], [10], [-1], range(10)):
        with pytest.raises(ValueError, match="vocabulary of 10"):
            Vocabulary(ids, 10)
