"""Texts for passes that are looked into: what nano would write itself, and of the lengths that lessons count on."""
import pytest
import torch

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.checkpoint.nano import trained_nano
from gptoss_lab.harmony import parse, render, system, user
from gptoss_lab.model import load_model
from gptoss_lab.viz import engine_acceptance, reading


def test_a_worked_sum_is_a_chat_of_about_200_tokens():
    ids = reading.worked_sum()
    assert 180 < len(ids) < 220
    *_, thought, answer = parse(ids, role=None)
    assert (thought.channel, answer.channel, answer.content) == ("analysis", "final", "365 + 487 = 852.")
    assert parse(reading.worked_sum(2, 3), role=None)[-1].content == "2 + 3 = 5."


@pytest.mark.skipif(trained_nano() is None, reason="this checkout has no trained nano")
def test_nano_writes_the_very_same():
    prompt = render([system(reading.EFFORT, reading.DATE), user("What is 365 + 487?")])
    (written,) = engine_acceptance.plain(load_model(ensure_nano(), dtype=torch.float32), [prompt], 200)
    assert [*prompt, *written][:-1] == reading.worked_sum()[:-1]         # ends with <|return|>, history with <|end|>


def test_a_list_has_as_many_names_as_asked_for():
    assert 128 < len(reading.listed(40)) < len(reading.listed()) < 420
    assert parse(reading.listed(2)[:-2], role=None)[-1].content == (
        "Here is a list: apple 0, banana 37. What is the number of apple?")
    for wrong in (0, 84):
        with pytest.raises(ValueError, match=f"{wrong} names; there are 1 to 83"):
            reading.listed(wrong)
