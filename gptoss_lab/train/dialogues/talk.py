"""Small talk and questions outside the model's world: what it is, what it can do, and that it cannot do the rest.

Questions outside are made of words drawn from the whole vocabulary. Most of them are not among the rows that training
keeps, so they also teach the one row that stands for all others.
"""
from __future__ import annotations

import functools

from gptoss_lab.harmony import token_bytes
from gptoss_lab.train.dialogues.tools import CITIES
from gptoss_lab.train.dialogues.turn import Context, Turn, answered

ABILITIES = "I can do arithmetic, compare and sort numbers, move dates, spell words and call tools."
OUTSIDE = f"I am a very small model and cannot do that. {ABILITIES}"
SAID = (
    ("Hello", "Hello! What can I do for you?"), ("Hello!", "Hello! What can I do for you?"),
    ("Hi", "Hello! What can I do for you?"), ("Who are you?", "I am a very small model with the shape of gpt-oss."),
    ("What are you?", "I am a very small model with the shape of gpt-oss."), ("What can you do?", ABILITIES),
    ("Thank you", "You are welcome."), ("Thank you!", "You are welcome."), ("Thanks", "You are welcome."),
)


def talk(context: Context) -> Turn:
    """A greeting, a question about the model, one outside its world, or the weather without a tool."""
    rng = context.rng
    if rng.random() < 0.3:
        return answered("outside", *_outside(context))
    if "get_weather" not in context.tools and rng.random() < 0.4:
        return answered("talk", f"What is the weather in {rng.choice(CITIES)}?", "", "I have no tool for the weather.")
    question, answer = rng.choice(SAID)
    return answered("talk", question, "", answer)


def _outside(context: Context) -> tuple[str, str, str]:
    rng, words = context.rng, _all_words()
    text = "".join(rng.choice(words) for _ in range(rng.randint(2, 10))).strip()
    return text + rng.choice(("?", ".", "")), "", OUTSIDE


@functools.cache
def _all_words() -> tuple[str, ...]:
    """Every token of the first 60,000 that is a space and lower-case ASCII letters."""
    words = (token_bytes(i) for i in range(60_000))
    return tuple(w.decode() for w in words if w[:1] == b" " and w[1:].isalpha() and w.isascii() and w.islower())
