"""A turn of a dialogue, and which problems may be trained on.

A turn is a question and all that follows it up to the final answer. It names every problem that it works out, the
sub-problems of its steps too. A problem is held out by the hash of its canonical key, never of its text: 37 + 48,
48 + 37 and 85 - 48 are one problem, so no wording and no direction of a held-out problem is ever trained on.
"""
from __future__ import annotations

import datetime
import hashlib
import random
from dataclasses import dataclass

from gptoss_lab.harmony import Message, assistant

Key = tuple[str | int, ...]
"""A problem: its kind and its operands in canonical order."""

HELD_OUT_BYTES = 13
"""Of the 256 values of a key's first hash byte, how many mean held out: 5.1 %."""


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    task: the kind, by which accuracy is counted. question: the user's text. steps: what follows, in order: messages of
    the assistant (analysis, calls), results of tools, and the final answer. problems: keys, the question's own first;
    empty for small talk. value: the number that the answer is, for a follow-up question, or None.
    """

    task: str
    question: str
    steps: tuple[Message, ...]
    problems: tuple[Key, ...] = ()
    value: int | None = None

    @property
    def answer(self) -> str:
        """The text of the final message."""
        return self.steps[-1].content


@dataclass(frozen=True)
class Context:
    """What a turn depends on.

    rng: its only source of chance. effort: "low", "medium" or "high". brief: whether the answer is the bare value.
    tools: names of the function tools that there are. today: the date in the system message. last: the value of the
    previous answer.
    """

    rng: random.Random
    effort: str
    brief: bool = False
    tools: frozenset[str] = frozenset()
    today: datetime.date | None = None
    last: int | None = None


def held_out(key: Key) -> bool:
    """Whether a problem is kept for evaluation."""
    return hashlib.sha256("/".join(map(str, key)).encode()).digest()[0] < HELD_OUT_BYTES


def trainable(turn: Turn) -> bool:
    """Whether no problem of the turn is held out."""
    return not any(held_out(key) for key in turn.problems)


def answered(
    task: str, question: str, thought: str, answer: str, problems: tuple[Key, ...] = (), value: int | None = None
) -> Turn:
    """A turn without tools: analysis (left out where `thought` is empty), then the final answer."""
    steps = (assistant(thought, "analysis"),) if thought else ()
    return Turn(task, question, (*steps, assistant(answer)), problems, value)
