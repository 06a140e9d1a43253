"""A dialogue to token ids and the places that are learned: exactly what the model itself has to write, nothing else.

Prompts are rendered by `gptoss_lab.harmony` as for a chat. The assistant's messages are written as the models write
them, with the recipient in the channel part, which is how the parser keeps them and the engine has them in its cache.
A chat that comes back without the model's own tokens has the recipient in the author part, so a share of the calls
stands there, and then only what follows them is learned. Earlier turns are pruned by the format's rule: their analysis
is gone, so they are context, unless no turn of the dialogue has any; then every answer is learned.

Rendering a system message through the library takes 0.3 ms and there are few of them, so messages are kept.
"""
from __future__ import annotations

import datetime
import functools
import random
from dataclasses import dataclass

from gptoss_lab.harmony import Message, encode, prompt_header, prune, render_message
from gptoss_lab.harmony.ids import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from gptoss_lab.train.dialogues.compose import Dialogue, Opening

FOREIGN_CALLS = 0.15
"""Share of calls in the library's form."""


@dataclass
class Rendered:
    """ids: token ids. learned: for each, whether the model has to predict it."""

    ids: list[int]
    learned: list[bool]

    def add(self, ids: list[int] | tuple[int, ...], learned: bool) -> None:
        """Append ids, all learned or none."""
        self.ids += ids
        self.learned += [learned] * len(ids)


def render_dialogue(dialogue: Dialogue, rng: random.Random | None = None) -> Rendered:
    """The whole dialogue, the last turn and its answer included. rng: chooses calls in the library's form, else none.

    A last answer ends with <|return|>, an earlier one with <|end|>, as in stored history.
    """
    out = Rendered([], [])
    opening = dialogue.opening
    out.add(_system(opening.effort, opening.today, bool(opening.tools)), False)
    if opening.tools or opening.brief:
        out.add(_developer(opening.tools, opening.brief), False)
    plain = all(len(turn.steps) == 1 for turn in dialogue.turns)
    for turn in dialogue.turns[:-1]:
        out.add(_text("user", turn.question), False)
        for message in prune(turn.steps):
            _add(out, message, learned=plain, last=False)
    turn = dialogue.turns[-1]
    out.add(_text("user", turn.question), False)
    foreign = _foreign(turn.steps, rng)
    for index, message in enumerate(turn.steps):
        if index < foreign:
            out.add(render_message(message), False)
        else:
            _add(out, message, learned=True, last=index == len(turn.steps) - 1, first=index == foreign)
    return out


def prompt_of(dialogue: Dialogue) -> list[int]:
    """The ids of the prompt of the last turn, up to <|start|>assistant, as `gptoss_lab.harmony.render` gives them."""
    rendered = render_dialogue(dialogue)
    turn = dialogue.turns[-1]
    tail = Rendered([], [])
    for index, message in enumerate(turn.steps):
        _add(tail, message, learned=True, last=index == len(turn.steps) - 1, first=index == 0)
    return rendered.ids[: len(rendered.ids) - len(tail.ids) + len(_header())]


def written(message: Message, last: bool = False) -> list[int]:
    """The ids of a message of the assistant as a model writes them after <|start|>assistant. last: it ends the turn."""
    if message.is_tool_call:
        header = [CHANNEL, *_encoded(f"{message.channel} to={message.recipient} "), CONSTRAIN, *_encoded("json")]
        return [*header, MESSAGE, *encode(message.content), CALL]
    end = RETURN if last else END
    return [CHANNEL, *_encoded(message.channel), MESSAGE, *encode(message.content), end]


def _add(out: Rendered, message: Message, *, learned: bool, last: bool, first: bool = True) -> None:
    """Append one step. After its own <|end|> the model writes the next header itself; after a result it is given."""
    if message.role == "tool":
        out.add(_result(message), False)
        return
    given = first or out.ids[-1] != END or not out.learned[-1]
    out.add(_header(), learned and not given)
    ids = written(message, last)
    out.add(ids, learned)
    if learned and ids[-1] == END and message.channel == "final":
        out.learned[-1] = False                     # a model ends its answer with <|return|>


def _foreign(steps: tuple[Message, ...], rng: random.Random | None) -> int:
    """How many of the steps are context in the library's form: up to the first result, or none."""
    results = [index for index, message in enumerate(steps) if message.role == "tool"]
    return results[0] + 1 if results and rng is not None and rng.random() < FOREIGN_CALLS else 0


@functools.lru_cache(maxsize=50_000)
def _system(effort: str, today: datetime.date | None, functions: bool) -> tuple[int, ...]:
    return tuple(render_message(Opening(effort, today).messages[0], has_functions=functions))


@functools.cache
def _developer(tools: frozenset[str], brief: bool) -> tuple[int, ...]:
    return tuple(render_message(Opening("low", None, tools, brief).messages[1], has_functions=bool(tools)))


@functools.cache
def _encoded(text: str) -> tuple[int, ...]:
    return tuple(encode(text))


@functools.cache
def _header() -> tuple[int, ...]:
    return tuple(prompt_header())


def _text(role: str, text: str) -> list[int]:
    """A message of plain text, as the library renders it."""
    return [START, *_encoded(role), MESSAGE, *encode(text), END]


def _result(message: Message) -> list[int]:
    """A tool's result, as the library renders it."""
    header = (*_encoded(f"{message.name} to={message.recipient}"), CHANNEL, *_encoded(message.channel))
    return [START, *header, MESSAGE, *encode(message.content), END]
