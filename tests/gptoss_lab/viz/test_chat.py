"""The chat of notebook 03: its loop over tools, what it draws, and the box that grows."""
import html
import re

import pytest

from gptoss_lab.harmony import Message, Tool, decode, developer, encode, system, tool_call, user
from gptoss_lab.viz import chat

START = [system("low", "2025-06-28"), developer("Be brief.", [Tool("multiply", "a times b")])]
CALL = ('<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant<|channel|>commentary to=functions.multiply '
        '<|constrain|>json<|message|>{"a": 17, "b": 23}<|call|>')
FINAL = "<|channel|>final<|message|>It is 391.<|return|>"
TOOLS = {"multiply": lambda a, b: a * b}


def writer(*texts):
    """A model that writes these texts one after the other, and the prompts that it saw."""
    seen, left = [], [encode(text, special=True) for text in texts]

    def write(prompt):
        seen.append(prompt)
        return left.pop(0)

    return write, seen


def test_a_tool_that_is_called_runs_and_the_model_sees_its_result():
    write, seen = writer(CALL, FINAL)
    added = chat.answer([*START, user("17 * 23?")], write, TOOLS)
    assert [(m.role, m.channel, m.content) for m in added] == [
        ("assistant", "analysis", "Use it."), ("assistant", "commentary", '{"a": 17, "b": 23}'),
        ("tool", "commentary", "391"), ("assistant", "final", "It is 391.")]
    assert seen[1][: len(seen[0])] == seen[0] and encode(CALL, special=True) == seen[1][len(seen[0]):][
        : len(encode(CALL, special=True))]
    assert decode(seen[1]).endswith("<|message|>391<|end|><|start|>assistant")


def test_a_model_that_never_stops_calling_is_stopped():
    write, seen = writer(*[CALL] * 5)
    added = chat.answer([user("x")], write, TOOLS, rounds=3)
    assert len(seen) == 3 and sum(m.role == "tool" for m in added) == 3


@pytest.mark.parametrize(("call", "text"), [
    (tool_call("functions.gone", {}), "error: there is no function 'gone'"),
    (tool_call("functions.multiply", "not json"), "error: JSONDecodeError"),
    (tool_call("functions.multiply", {"a": 1}), "error: TypeError"),
    (tool_call("functions.multiply", "[1, 2]"), "error: TypeError"),
    (tool_call("functions.divide", {"a": 1, "b": 0}), "error: ZeroDivisionError: division by zero"),
    (tool_call("functions.multiply", {"a": 6, "b": 7}), "42"),
])
def test_a_tool_that_fails_tells_the_model_so(call, text):
    assert chat.run(call, {**TOOLS, "divide": lambda a, b: a / b}).startswith(text)


def test_noise_is_kept_as_what_it_said_and_does_not_stop_the_next_turn():
    write, seen = writer("I cannot<|channel|>", FINAL)
    added = chat.answer([user("x")], write, TOOLS)
    assert [m.content for m in added] == ["I cannot<|channel|>"]
    chat.answer([user("x"), *added, user("y")], write, TOOLS)
    assert [i for i in seen[1] if i >= 199998].count(200005) == 1  # its marker has become text


def test_channels_stand_apart_and_every_token_is_there():
    write, _ = writer(CALL, FINAL)
    shown = chat.Chat((*START, user("17 * 23?"), *chat.answer([user("17 * 23?")], write, TOOLS)))
    drawn = shown._repr_html_()
    assert drawn.count("<details") == 7 and drawn.count("<details open") == 2  # the user's message and the answer
    for label in ("user: 17 * 23?", "assistant · analysis: Use it.", "functions.multiply · commentary: 391",
                  "assistant · commentary · to functions.multiply", "assistant · final: It is 391."):
        assert label in html.unescape(drawn) and label.split(":")[0] in str(shown)
    line = "Calls to these tools must go to the commentary channel"
    assert line in str(shown).replace("¦", "") and "commentary channel" not in str(chat.Chat((START[0], user("x"))))
    assert "title=" in drawn and re.search(r"\b200012\b", drawn)  # ids on hover
    evil = chat.Chat((user("<script>alert(1)</script>"),))._repr_html_()
    assert "<script>" not in evil


def test_the_box_grows_with_every_line(monkeypatch):
    shown, boxes = [], []
    monkeypatch.setattr(chat, "display", lambda what, raw=False: (boxes if raw else shown).append(what))
    made, text = [], chat.ipywidgets.Text
    monkeypatch.setattr(chat.ipywidgets, "Text", lambda **options: made.append(text(**options)) or made[-1])
    write, seen = writer(CALL, FINAL, FINAL)
    chat.box(START, write, TOOLS, "A line to type into, and the conversation below it.")
    assert boxes[0]["text/plain"].startswith("A line") and boxes[0][chat.VIEW]["model_id"]
    made[0].value = "17 * 23?"
    assert made[0].value == "" and len(shown) == 1 and len(shown[0].messages) == 7
    made[0].value = "  "
    made[0].value = "thanks"
    assert len(shown) == 2 and isinstance(shown[1].messages[-2], Message) and shown[1].messages[-2].content == "thanks"
    assert len(seen) == 3
    with pytest.raises(ValueError, match="a sentence is needed"):
        chat.box(START, write, TOOLS, " ")


@pytest.mark.parametrize(("expression", "value"), [("4711 * 815", 3839465), ("2+3", 5), ("3 - -4", 7), ("-3*4", -12)])
def test_the_calculator(expression, value):
    assert chat.calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "2 +", "1 / 2", "2 ** 3", "__import__('os')", "1 + 2 + 3"])
def test_the_calculator_evaluates_nothing_else(expression):
    with pytest.raises(ValueError, match="two whole numbers"):
        chat.calculate(expression)
