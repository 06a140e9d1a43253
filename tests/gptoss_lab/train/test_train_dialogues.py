"""Dialogues: the split by problem, the rendering against gptoss_lab.harmony, what is learned, right answers."""
import datetime
import json
import random
import re

import pytest

from gptoss_lab.harmony import decode, parse, prune, render, tool_call, user
from gptoss_lab.harmony.ids import CALL, END, RETURN
from gptoss_lab.train.dialogues import (
    Context,
    held_out,
    held_out_dialogue,
    prompt_of,
    render_dialogue,
    trainable,
    training_dialogue,
)
from gptoss_lab.train.dialogues.compose import EFFORTS
from gptoss_lab.train.dialogues.dates import date
from gptoss_lab.train.dialogues.lists import compare, sort
from gptoss_lab.train.dialogues.numbers import arithmetic
from gptoss_lab.train.dialogues.tools import calculate, weather
from gptoss_lab.train.dialogues.words import letters


@pytest.fixture(scope="module")
def training():
    rng = random.Random(1)
    return [training_dialogue(rng) for _ in range(1500)]


@pytest.fixture(scope="module")
def evaluation():
    rng = random.Random(2)
    return [held_out_dialogue(rng) for _ in range(300)]


def turns(task, count=200, **context):
    rng = random.Random(3)
    return [task(Context(rng, rng.choice(EFFORTS), rng.random() < 0.3, **context)) for _ in range(count)]


def test_no_problem_of_an_evaluation_question_is_trained_on(training, evaluation):
    trained = {key for d in training for turn in d.turns for key in turn.problems}
    asked = {d.turns[-1].problems[0] for d in evaluation}
    assert len(trained) > 1000 and len(asked) > 200
    assert not trained & asked
    assert not any(held_out(key) for key in trained) and all(held_out(key) for key in asked)


def test_no_training_step_works_out_a_held_out_sum(training):
    """Also where it is spelled in another direction or inside a check, which the keys alone would not show."""
    spelled = re.compile(r"(?<!\d)(\d{1,3}) ?([-+]) ?(\d{1,3})(?: = |=)(-?\d+)(?!\d)")
    found = 0
    for dialogue in training:
        for turn in dialogue.turns:
            for a, sign, b, value in spelled.findall(turn.answer):
                low, high = sorted((int(a), int(b)) if sign == "+" else (min(int(a), int(b)), abs(int(value))))
                assert not held_out(("sum", low, high))
                found += 1
    assert found > 200


def test_one_seed_gives_one_sequence():
    first, second, other = (
        [training_dialogue(rng) for _ in range(20)] for rng in (random.Random(5), random.Random(5), random.Random(6)))
    assert first == second != other


def test_prompts_are_what_harmony_renders(training, evaluation):
    for dialogue in [*training[:150], *evaluation[:50]]:
        history = [m for turn in dialogue.turns[:-1] for m in (user(turn.question), *prune(turn.steps))]
        if any(m.is_tool_call for m in history):
            continue                    # written in the model's form, not the library's; compared below as messages
        asked = [*dialogue.opening.messages, *history, user(dialogue.turns[-1].question)]
        assert prompt_of(dialogue) == render(asked, history="all")


def test_what_is_written_reads_back_strictly_as_the_steps(training):
    for dialogue in training[:300]:
        rendered, prompt = render_dialogue(dialogue), prompt_of(dialogue)
        steps = dialogue.turns[-1].steps
        read = parse(rendered.ids[len(prompt):])
        assert read == list(steps)
        assert [m.end for m in read if m.role == "assistant"] == [
            CALL if m.is_tool_call else RETURN if m is steps[-1] else END for m in steps if m.role == "assistant"]


def test_only_what_the_model_writes_is_learned(training):
    """Learned ids, cut where the prompt of a later generation begins, are exactly the assistant's messages."""
    for dialogue in training[:300]:
        rendered = render_dialogue(dialogue)
        if all(len(t.steps) == 1 for t in dialogue.turns):
            continue                    # every answer is learned there
        learned = [i for i, yes in zip(rendered.ids, rendered.learned, strict=True) if yes]
        mine = [m for m in dialogue.turns[-1].steps if m.role == "assistant"]
        pieces = re.split(r"(?<=<\|end\|>)<\|start\|>assistant|(?<=<\|call\|>)", decode(learned))
        assert [p for p in pieces if p] == [decode(_written(m, m is mine[-1])) for m in mine]


def _written(message, last):
    from gptoss_lab.harmony import encode

    if message.is_tool_call:
        return encode(f"<|channel|>commentary to={message.recipient} <|constrain|>json<|message|>"
                      f"{message.content}<|call|>", special=True)
    end = "<|return|>" if last else "<|end|>"
    return encode(f"<|channel|>{message.channel}<|message|>{message.content}{end}", special=True)


def test_all_answers_of_a_plain_dialogue_are_learned_but_their_ends():
    rng = random.Random(8)
    plain = next(d for d in iter(lambda: training_dialogue(rng), None)
                 if len(d.turns) == 3 and all(len(t.steps) == 1 for t in d.turns))
    rendered = render_dialogue(plain)
    text = decode([i for i, yes in zip(rendered.ids, rendered.learned, strict=True) if yes])
    expected = "".join(f"<|channel|>final<|message|>{t.answer}" for t in plain.turns) + "<|return|>"
    assert text == expected


def test_calls_in_the_librarys_form_are_context_only():
    rng = random.Random(9)
    dialogue = next(d for d in iter(lambda: training_dialogue(rng), None) if d.task == "calculator")
    always = random.Random(0)
    always.random = lambda: 0.0
    rendered = render_dialogue(dialogue, always)
    context = [i for i, yes in zip(rendered.ids, rendered.learned, strict=True) if not yes]
    assert "assistant to=functions.calculator<|channel|>commentary" in decode(context)
    assert CALL in context and CALL not in [
        i for i, yes in zip(rendered.ids, rendered.learned, strict=True) if yes]


def test_efforts_differ_in_length(training):
    mean = {}
    for effort in EFFORTS:
        thoughts = [m.content for d in training for t in d.turns[-1:] for m in t.steps
                    if d.opening.effort == effort and m.channel == "analysis" and t.task in ("add", "subtract")]
        mean[effort] = sum(map(len, thoughts)) / len(thoughts)
    assert mean["low"] * 1.5 < mean["medium"] and mean["medium"] * 1.5 < mean["high"]


def test_long_dialogues_pass_4096_positions():
    rng = random.Random(10)
    lengths = [len(prompt_of(held_out_dialogue(rng, far=True))) for _ in range(3)]
    assert min(lengths) > 4096 and max(lengths) < 8000


# -- answers against Python --------------------------------------------------------------------------------------------
def test_arithmetic_answers():
    for turn in turns(arithmetic):
        value = int(re.search(r"-?\d+(?=\.?$)", turn.answer).group())
        a, b = (int(n) for n in re.findall(r"\d+", turn.question))
        sign = next(s for s, words in {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times")}.items()
                    if any(w in turn.question for w in words))
        assert value == {"+": a + b, "-": a - b, "*": a * b}[sign]


def test_dates_against_datetime():
    today = datetime.date(2024, 2, 20)
    for turn in turns(date, today=today):
        answer = datetime.date.fromisoformat(re.search(r"\d{4}-\d\d-\d\d", turn.answer).group())
        days = int(m.group(1)) if (m := re.search(r"(?<!-)\b(\d+) days?", turn.question)) else 1
        start = re.search(r"\d{4}-\d\d-\d\d", turn.question)
        first = datetime.date.fromisoformat(start.group()) if start else today
        assert answer == first + datetime.timedelta(-days if "before" in turn.question else days)
        for month in re.findall(r"Month (\d+) of (\d+) has (\d+) days", turn.steps[0].content):
            number, year, length = map(int, month)
            following = datetime.date(year + number // 12, number % 12 + 1, 1)
            assert (following - datetime.date(year, number, 1)).days == length


def test_sorting_and_comparing():
    for turn in turns(sort):
        asked = [int(n) for n in re.findall(r"\d+", turn.question)]
        answer = [int(n) for n in re.findall(r"\d+", turn.answer)]
        assert answer == sorted(asked, reverse="largest to smallest" in turn.question)
    for turn in turns(compare):
        a, b = (int(n) for n in re.findall(r"\d+", turn.question))
        assert turn.value == (max if "larger" in turn.question else min)(a, b)
        assert str(turn.value) in turn.answer


def test_letters_against_python():
    for turn in turns(letters, 400):
        word = turn.problems[0][-1]
        if turn.task == "count":
            assert turn.value == word.count(turn.problems[0][1])
        elif turn.task == "length":
            assert turn.value == len(word)
        else:
            right = word if turn.task == "spell" else word[::-1]
            assert turn.answer.replace(" ", "") == right


def test_calls_are_json_and_results_right():
    for turn in turns(calculate, tools=frozenset({"calculator"})):
        call, result = turn.steps[-3], turn.steps[-2]
        a, sign, b = json.loads(call.content)["expression"].split()
        assert int(result.content) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert call == tool_call("functions.calculator", call.content) and result.content in turn.answer
    for turn in turns(weather, tools=frozenset({"get_weather"})):
        cities = [json.loads(m.content)["city"] for m in turn.steps if m.is_tool_call]
        warmth = [int(m.content.split()[0]) for m in turn.steps if m.role == "tool"]
        assert all(city in turn.question for city in cities)
        if turn.task == "warmer":
            assert cities[warmth.index(max(warmth))] in turn.answer


def test_a_turn_with_a_held_out_problem_is_not_trainable():
    rng = random.Random(11)
    turn = held_out_dialogue(rng).turns[-1]
    assert not trainable(turn)
