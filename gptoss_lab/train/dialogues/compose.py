"""Dialogues: a system message, perhaps tools and an instruction, and one or more turns, all from one seed.

Which split a dialogue belongs to is a matter of its problems (turn.py). A training dialogue has only trainable turns;
an evaluation dialogue ends with a turn whose own problem is held out, after turns that are trainable.
"""
from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gptoss_lab.harmony import Message, developer, system
from gptoss_lab.train.dialogues.dates import date
from gptoss_lab.train.dialogues.lists import compare, sort
from gptoss_lab.train.dialogues.memory import NOTE_TOKENS, recall
from gptoss_lab.train.dialogues.numbers import arithmetic, follow_up
from gptoss_lab.train.dialogues.talk import talk
from gptoss_lab.train.dialogues.tools import TOOLS, calculate, weather
from gptoss_lab.train.dialogues.turn import Context, Turn, held_out, trainable
from gptoss_lab.train.dialogues.words import letters

EFFORTS = ("low", "medium", "high")
BRIEF = "Be brief."
LONG_SHARE = 0.004
"""Dialogues that go beyond 4,096 positions; at 5,000 tokens and more each they are about a tenth of all tokens."""
LONG_TOKENS = (1_500, 6_500)

_TASKS: tuple[tuple[float, str | None, Callable[[Context], Turn]], ...] = (
    (48, None, arithmetic), (8, None, compare), (8, None, sort), (8, None, date), (9, None, letters), (3, None, talk),
    (60, "calculator", calculate), (25, "get_weather", weather),
)
"""(weight, the tool that it needs, task)."""


@dataclass(frozen=True)
class Opening:
    """What stands before the first question. effort: of reasoning. tools: names. brief: an instruction to be brief."""

    effort: str
    today: datetime.date | None = None
    tools: frozenset[str] = frozenset()
    brief: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The system message, and the developer's where there are tools or an instruction."""
        first = system(self.effort, self.today)
        if not (self.tools or self.brief):
            return (first,)
        return first, developer(BRIEF if self.brief else None, [TOOLS[name] for name in sorted(self.tools)])


@dataclass(frozen=True)
class Dialogue:
    """An opening and its turns, in order."""

    opening: Opening
    turns: tuple[Turn, ...]

    @property
    def task(self) -> str:
        """The task of the last turn, by which a dialogue is counted."""
        return self.turns[-1].task


def training_dialogue(rng: random.Random) -> Dialogue:
    """A dialogue without any held-out problem."""
    return _dialogue(rng, rng.random() < LONG_SHARE, final=trainable)


def held_out_dialogue(rng: random.Random, *, far: bool = False) -> Dialogue:
    """A dialogue whose last turn asks a held-out problem. far: a recall of 4,200 tokens and more."""
    return _dialogue(rng, far, final=_asks_held_out, tokens=(4_200, LONG_TOKENS[1]) if far else LONG_TOKENS)


def _dialogue(
    rng: random.Random, long: bool, final: Callable[[Turn], bool], tokens: tuple[int, int] = LONG_TOKENS
) -> Dialogue:
    effort = rng.choice(EFFORTS)
    today = datetime.date(2024, 1, 1) + datetime.timedelta(rng.randint(0, 3287)) if rng.random() < 0.7 else None
    tools = frozenset() if long else frozenset(rng.choice(_TOOL_SETS))
    opening = Opening(effort, today, tools, brief=rng.random() < 0.2)
    base = Context(rng, effort, opening.brief, tools, today)
    if long or rng.random() < 0.04:
        notes = rng.randint(*tokens) // NOTE_TOKENS if long else rng.randint(2, 40)
        return Dialogue(opening, _recall_turns(base, notes, final))
    count = rng.choices((1, 2, 3, 4), (70, 18, 8, 4))[0]
    turns: list[Turn] = []
    for index in range(count):
        last = turns[-1].value if turns else None
        context = replace(base, last=last)
        turns.append(_draw(context, final if index == count - 1 else trainable))
    return Dialogue(opening, tuple(turns))


_TOOL_SETS = ((), (), (), (), (), ("calculator",), ("get_weather",), ("calculator", "get_weather"))


def _draw(context: Context, accept: Callable[[Turn], bool]) -> Turn:
    """A turn of a random task that the tools allow; with a calculator arithmetic goes to it."""
    allowed = [
        (weight, task) for weight, tool, task in _TASKS
        if (tool is None or tool in context.tools) and not (task is arithmetic and "calculator" in context.tools)
    ]
    while True:
        follow = context.last is not None and "calculator" not in context.tools and context.rng.random() < 0.3
        task = follow_up if follow else context.rng.choices([t for _, t in allowed], [w for w, _ in allowed])[0]
        turn = task(context)
        if accept(turn):
            return turn


def _recall_turns(context: Context, notes: int, final: Callable[[Turn], bool]) -> tuple[Turn, ...]:
    """All questions but the last are trainable, and the last is what `final` accepts."""
    while True:
        turns = recall(context, notes, context.rng.randint(1, 6))
        kept = [turn for turn in turns[:-1] if trainable(turn)]
        if turns[:1] == kept[:1] or len(turns) == 1:
            last = turns[-1]
            if final(last):
                return (*kept, last)


def _asks_held_out(turn: Turn) -> bool:
    return bool(turn.problems) and held_out(turn.problems[0])
