"""Letters of words: spelling, spelling backwards, counting letters, lengths. Words are listed here; no outside data.

The tokenizer hides the letters of a word, so the model must know how each of these words is spelled. Letters that the
user writes apart ("k t a p o") need no such knowledge, and there is no end of them. Answers have their letters apart:
a word spelled backwards would be cut into pieces that nothing else uses.
"""
from __future__ import annotations

from gptoss_lab.train.dialogues.turn import Context, Turn, answered

_WORDS = (
    "apple banana berry bread butter candle castle cherry circle cloud coffee cotton desert dinner dragon engine "
    "family farmer finger flower forest friend garden ginger guitar hammer harbor island jacket kitchen ladder lemon "
    "letter library lion market melon mirror money monkey morning mountain music needle number ocean orange paper "
    "pencil pepper picture planet pocket potato rabbit river rocket school shadow silver sister spring station stone "
    "strawberry street summer sunset table tiger timber tomato tower train valley village violin water whale window "
    "winter yellow zebra"
)
WORDS = tuple(_WORDS.split())
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(context: Context) -> Turn:
    """One of the letter tasks, on a listed word or on letters written apart."""
    rng = context.rng
    apart = rng.random() < 0.4
    word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8))) if apart else rng.choice(WORDS)
    shown = " ".join(word) if apart else f'"{word}"'
    return rng.choice((_backwards, _count, _length, _count if apart else _spell))(context, word, shown)


def _spell(context: Context, word: str, shown: str) -> Turn:
    question = context.rng.choice((f"Spell {shown}.", f"How is {shown} spelled?"))
    return answered("spell", question, "", " ".join(word), (("spell", word),))


def _backwards(context: Context, word: str, shown: str) -> Turn:
    question = context.rng.choice((f"Spell {shown} backwards.", f"What is {shown} backwards?"))
    forwards = " ".join(word)
    thought = {"low": "", "medium": f"Letters: {forwards}."}.get(context.effort, f"Letters: {forwards}. Last first.")
    return answered("backwards", question, thought, " ".join(reversed(word)), (("backwards", word),))


def _count(context: Context, word: str, shown: str) -> Turn:
    rng = context.rng
    letter = rng.choice(word) if rng.random() < 0.75 else rng.choice(LETTERS)
    count, found, marks = word.count(letter), 0, []
    for c in word:
        found += c == letter
        marks.append(f"{c} {found}" if context.effort != "low" else c)
    thought = f"Letters: {', '.join(marks)}." if context.effort != "low" else " ".join(marks)
    question = rng.choice((f'How many times is the letter "{letter}" in {shown}?', f'Count the "{letter}" in {shown}.'))
    answer = str(count) if context.brief else f"{count} {'time' if count == 1 else 'times'}."
    return answered("count", question, thought, answer, (("count", letter, word),), count)


def _length(context: Context, word: str, shown: str) -> Turn:
    numbered = ", ".join(f"{c} {i}" for i, c in enumerate(word, start=1))
    thought = " ".join(word) if context.effort == "low" else f"Letters: {numbered}."
    question = context.rng.choice((f"How many letters are in {shown}?", f"How many letters has {shown}?"))
    answer = str(len(word)) if context.brief else f"{len(word)} letters."
    return answered("length", question, thought, answer, (("length", word),), len(word))
