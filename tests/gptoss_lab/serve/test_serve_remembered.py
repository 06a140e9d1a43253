"""What is kept of turns: by tokens, the oldest dropped first."""
from gptoss_lab.harmony import Message, assistant
from gptoss_lab.serve.remembered import Remembered


def turn(tokens):
    return [Message("assistant", "x", "final", ids=tuple(range(tokens)))]


def test_the_oldest_is_dropped_when_there_is_no_room():
    kept = Remembered(capacity=30)
    kept.put("a", turn(9))
    kept.put("b", turn(9))
    kept.put("c", turn(9))
    assert kept.get("a") is not None  # and so it is the newest
    kept.put("d", turn(9))
    assert kept.get("b") is None and [kept.get(k) is None for k in "acd"] == [False] * 3
    kept.put("e", turn(100))
    assert [kept.get(k) for k in "acde"] == [None] * 4


def test_a_key_is_replaced_and_dropped_with_its_size():
    kept = Remembered(capacity=20)
    for _ in range(5):
        kept.put("a", turn(15))
    assert kept.get("a") == tuple(turn(15))
    assert kept.drop("a") and not kept.drop("a")
    kept.put("b", [assistant("no ids, so characters count")])
    assert kept.get("b") is None
