"""A chat whose machinery can be seen: channels apart, every token on hover, tools that really run.

`answer` is the whole of it, a function of a conversation, a writer of ids and a table of tools: render, let the model
write, read; run the tool that was called, put its result behind, and again, until there is an answer. `Chat` draws a
conversation; `box` adds a line to type into.
"""
from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets
from IPython.display import display

from gptoss_lab.harmony import Developer, Message, assistant, parse, render, render_message, tool_result, user
from gptoss_lab.viz.conversation import LOOK, show
from gptoss_lab.viz.explore import VIEW

Write = Callable[[list[int]], Sequence[int]]
"""Prompt ids to the ids that the model writes after them, up to a stop id."""
Tools = Mapping[str, Callable[..., Any]]
"""Functions by the names under which the developer message describes them."""


def answer(messages: Sequence[Message], write: Write, tools: Tools, rounds: int = 4) -> list[Message]:
    """What the assistant and its tools add to `messages`.

    rounds: how often the model may write; after the last one an open call stays open. What is not well formed is kept
    as what it said. A tool that fails, or is unknown, answers with the error as text: the model reads it and goes on.
    """
    added: list[Message] = []
    for _ in range(rounds):
        written = [_kept(m) for m in parse(write(render([*messages, *added])), strict=False) if m.role == "assistant"]
        calls = [message for message in written if message.is_tool_call]
        added += written + [tool_result(call, run(call, tools)) for call in calls]
        if not calls:
            break
    return added


def run(call: Message, tools: Tools) -> str:
    """Run the function that a call names with the arguments of its body, as text."""
    name = call.recipient.removeprefix("functions.")
    if name not in tools:
        return f"error: there is no function {name!r}"
    try:
        return str(tools[name](**json.loads(call.content)))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        return f"error: {type(error).__name__}: {error}"


def calculate(expression: str) -> int:
    """The value of "a + b", "a - b" or "a * b" with whole numbers, as a tool for `answer`. ValueError for others."""
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if found is None:
        raise ValueError(f"{expression!r} is not two whole numbers with +, - or * between them")
    a, b = int(found[1]), int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[found[2]]


def _kept(message: Message) -> Message:
    return message if message.problem is None else assistant(message.content)


@dataclass(frozen=True)
class Chat:
    """A conversation, message by message: `_repr_html_` for notebooks, `str` for everything else."""

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return "\n".join(f"{label(m)}: {text(m, self.has_functions)}" for m in self.messages)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(_block(message, self.has_functions) for message in self.messages)

    @property
    def has_functions(self) -> bool:
        """Whether a developer message describes tools: the system message then says where calls go."""
        return any(isinstance(m.content, Developer) and m.content.tools for m in self.messages)


def label(message: Message) -> str:
    """Who speaks, on which channel, to whom."""
    parts = [message.name if message.role == "tool" else message.role, message.channel]
    parts += [f"to {message.recipient}"] if message.is_tool_call else []
    return " · ".join(part for part in parts if part)


def text(message: Message, has_functions: bool = False) -> str:
    """The body; that of a system or developer message as it is rendered."""
    if isinstance(message.content, str):
        return message.content
    return str(show(render_message(message, has_functions=has_functions)))


def _block(message: Message, has_functions: bool) -> str:
    """One message: a coloured edge for its channel, its tokens inside, folded when it is not for the user."""
    kind = message.channel if message.channel in LOOK else message.role
    colour = LOOK.get(kind, LOOK["assistant"])[0]
    is_open = " open" if message.role == "user" or message.channel == "final" else ""
    body = show(render_message(message, has_functions=has_functions))._repr_html_()
    summary = html.escape(f"{label(message)}: {_first_line(message)}")
    return (f'<details{is_open} style="border-left:10px solid {colour};padding-left:8px;margin:4px 0">'
            f"<summary>{summary}</summary>{body}</details>")


def _first_line(message: Message) -> str:
    line = message.content.strip().split("\n", 1)[0] if isinstance(message.content, str) else "..."
    return line if len(line) <= 90 else line[:90] + "..."


def box(start: Sequence[Message], write: Write, tools: Tools, sentence: str) -> None:
    """Show a line to type into and the conversation below it, which grows with every line.

    start: system and developer messages. sentence: what the widget shows, for a reader of the stored notebook.
    ValueError if it is empty.
    """
    if not sentence.strip():
        raise ValueError("box: a sentence is needed for readers without a running kernel")
    said = list(start)
    line = ipywidgets.Text(placeholder="say something, then Enter", continuous_update=False)
    output = ipywidgets.Output()

    def say(change: dict[str, Any]) -> None:
        if not change["new"].strip():
            return
        said.append(user(change["new"].strip()))
        said.extend(answer(said, write, tools))
        line.value = ""
        with output:
            output.clear_output(wait=True)
            display(Chat(tuple(said)))

    line.observe(say, names="value")
    both = ipywidgets.VBox([line, output])
    bundle = {"text/plain": sentence, VIEW: {"version_major": 2, "version_minor": 0, "model_id": both.model_id}}
    display(bundle, raw=True)
