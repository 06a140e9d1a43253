"""Worked arithmetic: every fact that is written is true, and the written digits are the answer."""
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.train.dialogues import numbers

EQUATION = re.compile(r"(?<![\d*+=-])(-?\d+(?:[-+*]\d+)+)=(-?\d+)")
OPERAND = st.integers(0, 999)


def facts(text: str) -> list[tuple[str, int]]:
    return [(left, int(right)) for left, right in EQUATION.findall(text)]


def calculated(expression: str) -> int:
    """Left to right; no expression of the steps mixes products with sums."""
    first, *rest = re.findall(r"^-?\d+|[-+*]\d+", expression)
    value = int(first)
    for part in rest:
        other = int(part[1:])
        value = value + other if part[0] == "+" else value - other if part[0] == "-" else value * other
    return value


@given(st.sampled_from("+-*"), OPERAND, OPERAND, st.sampled_from(("low", "medium", "high")))
@settings(max_examples=300, deadline=None)
def test_every_written_equation_is_true(sign, a, b, effort):
    b = b % 8 + 2 if sign == "*" else b
    text, problems = numbers.worked(sign, a, b, effort)
    for left, right in facts(text):
        assert calculated(left) == right, text
    assert problems[0] == numbers.key(sign, a, b)
    if effort != "low":
        assert f"So {numbers.result(sign, a, b)}." in text
    if effort != "low" or max(a, b) >= 10:           # every place that both operands have is worked out
        assert len(facts(text)) >= (len(str(a)) if sign == "*" else min(len(str(a)), len(str(b))))


@given(OPERAND, OPERAND)
@settings(max_examples=200, deadline=None)
def test_the_last_digit_of_each_sum_is_a_digit_of_the_answer(a, b):
    text = numbers.add_steps(a, b, full=False)
    totals = [int(part.rpartition("=")[2]) for part in text.split(", ")]
    written = "".join(str(t % 10) for t in totals[:-1])
    assert str(totals[-1]) + written[::-1] == str(a + b)


@given(OPERAND, OPERAND)
@settings(max_examples=200, deadline=None)
def test_subtraction_ends_each_place_with_its_digit(a, b):
    a, b = max(a, b), min(a, b)
    places = re.findall(r"(?:ones|tens|hundreds): ([^.]*)\.", numbers.subtract_steps(a, b, full=True))
    found = int("".join(p.rpartition("=")[2].split()[-1] for p in reversed(places)))
    assert found == a - b
    short = numbers.subtract_steps(a, b, full=False).split(", ")
    assert len(short) == len(str(a)) and int("".join(p.rpartition("=")[2] for p in reversed(short))) == a - b


def test_efforts_differ():
    low, medium, high = (numbers.worked("+", 137, 488, effort)[0] for effort in ("low", "medium", "high"))
    assert low == "7+8=15, 3+8+1=12, 1+4+1=6"
    assert medium == ("ones: 7+8=15, write 5, carry 1. tens: 3+8+1=12, write 2, carry 1. hundreds: 1+4+1=6. So 625.")
    assert high.startswith(medium + " Check: 625-488: ") and high.endswith("So 137. Right.")


def test_a_borrow_goes_through_a_zero():
    assert numbers.subtract_steps(205, 98, True) == (
        "ones: borrow, 15-8=7. tens: 0-1=-1, borrow, 9-9=0. hundreds: 2-1=1.")
    assert numbers.subtract_steps(205, 98, False) == "15-8=7, 10-1-9=0, 2-1=1"


@pytest.mark.parametrize(("one", "other"), [
    (("+", 37, 48), ("+", 48, 37)), (("-", 85, 48), ("+", 37, 48)), (("-", 85, 37), ("+", 48, 37)),
    (("-", 48, 85), ("-", 85, 48)), (("*", 7, 12), ("*", 12, 7)),
])
def test_one_problem_has_one_key(one, other):
    assert numbers.key(*one) == numbers.key(*other)


def test_different_problems_have_different_keys():
    assert len({numbers.key("+", 1, 2), numbers.key("+", 1, 3), numbers.key("*", 1, 2)}) == 3
