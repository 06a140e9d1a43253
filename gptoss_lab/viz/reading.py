"""Texts for the passes that the lessons look into: chats that the nano checkpoint can read.

What a router or a sink does to words that a model has never seen says little. These are of the kind that nano was
trained on, and plain enough for any model: a sum worked digit by digit, and a list of names with numbers.
"""
from __future__ import annotations

from gptoss_lab.harmony import assistant, render, render_message, system, user
from gptoss_lab.train.dialogues.numbers import worked
from gptoss_lab.train.dialogues.words import WORDS

DATE = "2025-06-28"
EFFORT = "high"


def worked_sum(a: int = 365, b: int = 487) -> list[int]:
    """Ids of a chat: the question, the steps as reasoning, the answer. The default is about 200 tokens."""
    thought, _ = worked("+", a, b, EFFORT)
    steps = (assistant(thought, "analysis"), assistant(f"{a} + {b} = {a + b}."))
    question = render([system(EFFORT, DATE), user(f"What is {a} + {b}?")], next_role=None)
    return question + [token for step in steps for token in render_message(step)]


def listed(names: int = 70) -> list[int]:
    """Ids of a chat's prompt: a list of so many words with numbers, and a question about one. 70 are about 400 tokens.

    ValueError for more words than there are, or none.
    """
    if not 0 < names <= len(WORDS):
        raise ValueError(f"{names} names; there are 1 to {len(WORDS)}")
    notes = ", ".join(f"{word} {37 * n % 1000}" for n, word in enumerate(WORDS[:names]))
    return render([system("low", DATE), user(f"Here is a list: {notes}. What is the number of {WORDS[0]}?")])
