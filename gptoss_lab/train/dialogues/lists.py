"""Comparing two numbers and sorting a few: by the first digit that differs, and by taking the smallest again and again.

Low effort answers at once; medium shows the digit, or what is left after each choice; high also checks the order.
"""
from __future__ import annotations

from gptoss_lab.train.dialogues.numbers import PLACES, digits
from gptoss_lab.train.dialogues.turn import Context, Turn, answered


def compare(context: Context) -> Turn:
    """Which of two different numbers up to 999 is larger, or smaller."""
    rng = context.rng
    a = rng.randint(0, 999)
    b = rng.choice((rng.randint(0, 999), max(0, a - rng.randint(1, 30)), min(999, a + rng.randint(1, 30))))
    if a == b:
        b = a + 1 if a < 999 else a - 1
    larger = rng.random() < 0.6
    question = rng.choice((
        f"Which is {'larger' if larger else 'smaller'}, {a} or {b}?",
        f"Which number is {'larger' if larger else 'smaller'}: {a} or {b}?",
    ))
    value = max(a, b) if larger else min(a, b)
    thought = "" if context.effort == "low" else why(a, b) + (
        f" So {max(a, b)} is larger and {min(a, b)} is smaller." if context.effort == "high" else "")
    answer = str(value) if context.brief else f"{value} is {'larger' if larger else 'smaller'}."
    return answered("compare", question, thought, answer, (("compare", min(a, b), max(a, b)),), value)


def why(a: int, b: int) -> str:
    """The reason for the order of a and b: the number of digits, or the first digit that differs."""
    x, y = digits(a), digits(b)
    if len(x) != len(y):
        return f"{a} has {len(x)} digits, {b} has {len(y)}, so {max(a, b)} is larger."
    words = []
    for place in range(len(x) - 1, -1, -1):
        if x[place] != y[place]:
            sign = ">" if x[place] > y[place] else "<"
            words.append(f"{PLACES[place]} {x[place]}{sign}{y[place]}")
            break
        words.append(f"{PLACES[place]} {x[place]}={y[place]}")
    return ", ".join(words) + f", so {max(a, b)} is larger."


def sort(context: Context) -> Turn:
    """Three to six different numbers in rising or falling order."""
    rng = context.rng
    numbers = rng.sample(range(rng.choice((100, 1000))), rng.randint(3, 6 if context.effort != "low" else 4))
    falling = rng.random() < 0.25
    ordered = sorted(numbers, reverse=falling)
    listed, answer = (", ".join(map(str, row)) for row in (numbers, ordered))
    thought = "" if context.effort == "low" else _picks(numbers, falling)
    if context.effort == "high":
        sign = ">" if falling else "<"
        thought += " Check: " + f" {sign} ".join(map(str, ordered)) + ". Right."
    question = f"Sort {listed} from largest to smallest." if falling else rng.choice((
        f"Sort {listed}.", f"Sort {listed} from smallest to largest.", f"Put these in order: {listed}."))
    return answered("sort", question, thought, answer if context.brief else f"{answer}.", (("sort", *sorted(numbers)),))


def _picks(numbers: list[int], falling: bool) -> str:
    left, words = list(numbers), []
    while len(left) > 1:
        pick = max(left) if falling else min(left)
        left.remove(pick)
        words.append(f"{pick}, left {' '.join(map(str, left))}.")
    return f"{'Largest' if falling else 'Smallest'} first: " + " ".join(words)
