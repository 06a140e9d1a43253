"""The derivation in code: every right place of the sink gives the closed form, the wrong one its known error."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_kernels.attention import steps

LOGITS, VALUES, SINK = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], 2.0
NUMBER = st.floats(-50, 50)


def closed_form(logits: list[float], values: list[float], sink: float) -> float:
    weights = torch.softmax(torch.tensor([*logits, sink], dtype=torch.float64), 0)[:-1]
    return float((weights * torch.tensor(values, dtype=torch.float64)).sum())


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("place", steps.PLACES[:3])
def test_the_sink_counts_once_at_every_split_point(place, cut):
    assert steps.split_attention(LOGITS, VALUES, SINK, [cut], place) == pytest.approx(32.126854, abs=1e-6)


def test_counting_it_per_split_and_ignoring_it_give_the_known_errors():
    assert steps.split_attention(LOGITS, VALUES, SINK, [2], "every split") == pytest.approx(29.742711, abs=1e-6)
    assert steps.split_attention(LOGITS, VALUES, -math.inf, [2]) == pytest.approx(34.926527, abs=1e-6)


@given(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=40), NUMBER, st.integers(1, 9))
def test_online_softmax_is_the_softmax(pairs, sink, block):
    logits, values = [z for z, _ in pairs], [v for _, v in pairs]
    states = steps.online_softmax(logits, values, sink, block)
    assert len(states) == 1 + -(-len(pairs) // block) and states[0] == steps.State(sink, 1.0, 0.0)
    assert states[-1].out == pytest.approx(closed_form(logits, values, sink), abs=1e-9)
    whole = torch.logsumexp(torch.tensor([*logits, sink], dtype=torch.float64), 0)
    assert states[-1].lse == pytest.approx(float(whole), abs=1e-9)


@given(st.lists(NUMBER, min_size=1, max_size=20), NUMBER)
def test_the_sink_takes_what_the_keys_do_not_get(logits, sink):
    keys = closed_form(logits, [1.0] * len(logits), sink)
    assert steps.sink_mass(logits, sink) == pytest.approx(1 - keys, abs=1e-9)


def test_nothing_seen_gives_zero():
    assert steps.split_attention([], [], -math.inf, []) == 0.0
    assert steps.split_attention([], [], 3.0, [0, 0], "merge") == 0.0
    assert steps.sink_mass([1.0], -math.inf) == 0.0


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="place is 'last'"):
        steps.split_attention(LOGITS, VALUES, SINK, [1], "last")
    with pytest.raises(ValueError, match=r"cuts are \[3, 1\]"):
        steps.split_attention(LOGITS, VALUES, SINK, [3, 1])
    with pytest.raises(ValueError, match="block is 0"):
        steps.online_softmax(LOGITS, VALUES, SINK, 0)
