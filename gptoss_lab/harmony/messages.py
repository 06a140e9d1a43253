"""What a conversation is made of: a list of messages.

What: one frozen `Message` for all roles, the contents of system and developer messages as data, and a function for each
kind of message, named after it. How: plain dataclasses. Why not the types of openai-harmony: a message that the model
wrote has to keep its own tokens, so that it is rendered again as exactly the ids that the engine has in its cache, and
to say what was wrong with it when it was read leniently.
What is lost: content parts other than text; the models know no others.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptoss_lab.harmony.errors import ParseError, RenderError
from gptoss_lab.harmony.ids import ROLES

REASONING = ("low", "medium", "high")
"""How long the model is asked to think."""
NOT_TOOLS = ("all", "assistant", "user")
"""Recipients that are not tools."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, as `functions.NAME`.

    name: str. description: str, what it does. parameters: dict, a JSON schema, or None for no argument.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None

    def __post_init__(self):
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "_-.") for c in self.name):
            raise RenderError(f"tool name {self.name!r} is not usable; use ASCII letters, digits, '_', '-' and '.'")
        try:
            json.dumps(self.parameters, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RenderError(f"parameters of tool {self.name!r} are not a JSON schema: {error}") from None


@dataclass(frozen=True)
class System:
    """Content of the system message: who the model is, what day it is, how long it thinks.

    reasoning: "low", "medium", "high", or None to leave the line out. date: "YYYY-MM-DD" or a date; None (default)
    leaves the line out: the clock is never read. builtin_tools: any of "browser", "python".
    """

    reasoning: str | None = "medium"
    date: str | datetime.date | None = None
    identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
    builtin_tools: tuple[str, ...] = ()

    def __post_init__(self):
        if self.reasoning is not None and self.reasoning not in REASONING:
            raise RenderError(f"reasoning {self.reasoning!r} is unknown; use one of {', '.join(REASONING)}")
        for tool in self.builtin_tools:
            if tool not in ("browser", "python"):
                raise RenderError(f"built-in tool {tool!r} is unknown; use browser or python")
        if isinstance(self.date, str):
            try:
                well_written = str(datetime.date.fromisoformat(self.date)) == self.date
            except ValueError:
                well_written = False
            if not well_written:
                raise RenderError(f"date {self.date!r} is not a date; write it as YYYY-MM-DD")


@dataclass(frozen=True)
class Developer:
    """Content of a developer message: instructions (what applications call the system prompt) and function tools."""

    instructions: str | None = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Message:
    """One message.

    role: one of `ROLES`. content: the text; `System` and `Developer` data in the messages of those roles.
    channel: "analysis", "commentary", "final" or None. recipient: whom the message is for, such as
    "functions.get_weather"; None is everybody. content_type: as in the header, such as "<|constrain|>json".
    name: the tool's full name for the role tool ("functions.get_weather"), else an optional name of the author.

    Set by the parser only, and left out of comparisons:
    ids: tuple of int, the message's own tokens from <|start|> to its last, or None. end: the id that ended it; None in
    a parsed message means that the input ended inside the body. problem: in lenient mode the first error that strict
    mode would have raised here.
    """

    role: str
    content: str | System | Developer
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None
    ids: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    end: int | None = field(default=None, repr=False, compare=False)
    problem: ParseError | None = field(default=None, compare=False)

    def __post_init__(self):
        if self.role not in ROLES:
            raise RenderError(f"role {self.role!r} is unknown; use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str | System | Developer):
            raise RenderError(f"content {self.content!r} of a message of role {self.role!r} is not text; give a str")
        for kind, role in ((System, "system"), (Developer, "developer")):
            if isinstance(self.content, kind) and self.role != role:
                raise RenderError(f"{kind.__name__} content in a message of role {self.role!r}; its role is {role!r}")

    @property
    def is_tool_call(self) -> bool:
        """Whether the assistant addresses a tool. On any channel: the recipient decides."""
        return self.role == "assistant" and self.recipient is not None and self.recipient not in NOT_TOOLS


def system(
    reasoning: str | None = "medium", date: str | datetime.date | None = None, *, builtin_tools: Sequence[str] = ()
) -> Message:
    """Return the system message; see `System` for the arguments, and for those left out here."""
    return Message("system", System(reasoning, date, builtin_tools=tuple(builtin_tools)))


def developer(instructions: str | None = None, tools: Sequence[Tool] = ()) -> Message:
    """Return a developer message with `instructions` and function `tools`."""
    return Message("developer", Developer(instructions, tuple(tools)))


def user(text: str, *, name: str | None = None) -> Message:
    """Return a user's message."""
    return Message("user", text, name=name)


def assistant(text: str, channel: str = "final") -> Message:
    """Return a message of the assistant to everybody."""
    return Message("assistant", text, channel)


def tool_call(
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    channel: str = "commentary",
    content_type: str | None = "<|constrain|>json",
) -> Message:
    """Return a call of the tool with the full name `name`; `arguments` as text, or as a dict written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Message("assistant", text, channel, name, content_type)


def tool_result(call: Message | str, text: str) -> Message:
    """Return what a tool answered. `call`: the message that called it (its channel is kept), or the tool's full name.

    Raises `RenderError` when `call` is a message that calls no tool.
    """
    if isinstance(call, str):
        return Message("tool", text, "commentary", "assistant", name=call)
    if not call.is_tool_call:
        raise RenderError(f"a message of {call.role!r} to {call.recipient!r} calls no tool; give the call or a name")
    return Message("tool", text, call.channel, "assistant", name=call.recipient)
