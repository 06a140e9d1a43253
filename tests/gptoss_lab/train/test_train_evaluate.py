"""The evaluation gives full marks to the right answers and none to wrong or broken ones."""
import pytest

from gptoss_lab.harmony import encode
from gptoss_lab.train.dialogues.render import written
from gptoss_lab.train.evaluate import attempt, held_out_set, share, summary


def oracle(dialogues, spoil=lambda ids, message: ids):
    """A generator that knows the answers: the messages up to a call or the final one, as a model writes them."""
    state = {}

    def generate(prompts):
        answers = []
        for prompt in prompts:
            dialogue = next(d for d, ids in zip(dialogues, starts, strict=True) if prompt[: len(ids)] == ids)
            steps = [m for m in dialogue.turns[-1].steps if m.role == "assistant"]
            index, ids = state.get(id(dialogue), 0), []
            while True:
                if ids:
                    ids += encode("<|start|>assistant", special=True)
                message = steps[index]
                ids += spoil(written(message, message is steps[-1]), message)
                index += 1
                if message.is_tool_call or message is steps[-1]:
                    break
            state[id(dialogue)] = index
            answers.append(ids)
        return answers

    from gptoss_lab.train.dialogues import prompt_of

    starts = [prompt_of(d) for d in dialogues]
    return generate


@pytest.fixture(scope="module")
def dialogues():
    found = held_out_set(120, seed=3)
    assert {"calculator", "add"} <= {d.task for d in found}
    unique, seen = [], set()
    for d in found:
        key = (d.opening, tuple(t.question for t in d.turns))
        if key not in seen:
            seen.add(key)
            unique.append(d)
    return unique


def test_right_answers_get_full_marks(dialogues):
    report = summary(attempt(dialogues, oracle(dialogues)))
    assert report["exact_match"]["all"]["right"] == len(dialogues) == report["well_formed"]["right"]
    assert report["broken"] == []
    counts = {n: s["count"] for n, s in report["exact_match"].items()}
    assert sum(c for n, c in counts.items() if n.startswith("task ")) == counts["all"]
    assert sum(c for n, c in counts.items() if n.startswith("effort ")) == counts["all"]


def test_a_wrong_answer_gets_none(dialogues):
    def other(ids, message):
        return ids if message.channel != "final" else [*ids[:-1], *encode("!"), ids[-1]]

    report = summary(attempt(dialogues, oracle(dialogues, other)))
    assert report["exact_match"]["all"]["right"] == 0 and report["well_formed"]["right"] == len(dialogues)


def test_a_wrong_call_gets_none(dialogues):
    def other(ids, message):
        return encode("<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>"
                      '{"expression":"1 + 1"}<|call|>', special=True) if message.is_tool_call else ids

    report = summary(attempt(dialogues, oracle(dialogues, other)))["exact_match"]
    assert report["task calculator"]["right"] == 0 and report["task add"]["right"] == report["task add"]["count"]


def test_broken_harmony_is_counted(dialogues):
    broken = summary(attempt(dialogues, oracle(dialogues, lambda ids, message: ids[1:])))
    assert broken["well_formed"]["right"] == 0 and broken["exact_match"]["all"]["right"] == 0
    endless = summary(attempt(dialogues, lambda prompts: [encode("<|channel|>final<|message|>5", special=True)
                                                          for _ in prompts]))
    assert endless["well_formed"]["right"] == 0 and endless["broken"] == ["the generation has no end"]


@pytest.mark.parametrize(("right", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (95, 100, 0.8882, 0.9785)])
def test_wilson(right, count, low, high):
    found = share(right, count)
    assert found["low"] == pytest.approx(low, abs=5e-4) and found["high"] == pytest.approx(high, abs=5e-4)


def test_the_set_is_a_function_of_its_seed():
    assert held_out_set(5, 1) == held_out_set(5, 1) != held_out_set(5, 2)
