"""A conversation to token ids.

What: `render` writes a list of messages, and the header of the answer that the model is to give. How: openai-harmony
renders each message; this module decides which messages (`history`), and uses the model's own tokens for what the model
wrote. Text of a message is encoded as ordinary text, so "<|end|>" typed by a user is plain pieces, not the marker.
Why own tokens: the model writes `<|channel|>commentary to=functions.f` where the library writes
` to=functions.f<|channel|>commentary`, and a text has more than one way to be cut into tokens. The engine's cache holds
what the model wrote.
Why headers are read back: a recipient "a to=b" or a tool named "system" would be text that becomes structure.
What is lost: an answer keeps its tokens except the last, since in stored history it ends with <|end|>, not <|return|>.
"""

from __future__ import annotations

from collections.abc import Sequence

import openai_harmony as harmony

from gptoss_lab.harmony.errors import ParseError, RenderError
from gptoss_lab.harmony.header import read_header
from gptoss_lab.harmony.history import prune
from gptoss_lab.harmony.ids import CALL, END, MESSAGE, START
from gptoss_lab.harmony.messages import Developer, Message, System, Tool
from gptoss_lab.harmony.parse import parse
from gptoss_lab.harmony.vocabulary import encode, load_encoding


def render(messages: Sequence[Message], *, history: str = "format", next_role: str | None = "assistant") -> list[int]:
    """Return the ids of a conversation.

    history: which reasoning of earlier turns is kept, see `history.prune`: "format", "reference" or "all".
    next_role: the role of the message that the model is to write, whose header is begun; None to render only what is
        there. Raises `RenderError` for a message that cannot be written down without becoming another.
    """
    has_functions = any(isinstance(m.content, Developer) and m.content.tools for m in messages)
    ids = [i for message in prune(messages, history) for i in render_message(message, has_functions=has_functions)]
    return ids if next_role is None else ids + prompt_header(next_role)


def prompt_header(role: str = "assistant") -> list[int]:
    """Return the ids with which a prompt ends: <|start|> and the role."""
    return [START, *encode(role)]


def render_message(message: Message, *, has_functions: bool = False) -> list[int]:
    """Return the ids of one message, <|start|> to its end.

    has_functions: whether the conversation has function tools; the system message then names their channel.
    The tokens of a message that the model wrote are used as they are, if it was read without a problem.
    """
    if message.ids is not None and message.problem is None:
        return _own_tokens(message)
    options = harmony.RenderOptions(conversation_has_function_tools=bool(has_functions))
    try:
        ids = load_encoding().render(_library_message(message), options)
    except (RuntimeError, ValueError) as error:
        raise RenderError(f"a message of role {message.role!r} cannot be rendered: {_one_line(error)}") from None
    _check_header(message, ids)
    return ids


def _own_tokens(message: Message) -> list[int]:
    """Return the tokens of a message that the model wrote, after checking that they still say what its fields say."""
    closed = list(message.ids) if message.end is not None else [*message.ids, END]
    try:
        read = parse(closed, role=None)
    except ParseError as error:
        raise RenderError(f"the message's own tokens cannot be used: {_one_line(error)}") from None
    if len(read) != 1 or read[0] != message:
        raise RenderError(
            f"the tokens of a message of role {message.role!r} say something else than its fields; "
            "a message that was changed is given ids=None"
        )
    closed[-1] = CALL if message.is_tool_call else END
    return closed


def _check_header(message: Message, ids: Sequence[int]) -> None:
    """Raise `RenderError` unless the header in `ids` reads back as the fields of `message`."""
    header = read_header(ids[1 : ids.index(MESSAGE)])
    expected = (message.role, message.name, message.channel, message.recipient, message.content_type)
    if header.problem is not None or header.fields != expected:
        names = ("role", "name", "channel", "recipient", "content_type")
        given = ", ".join(f"{n}={v!r}" for n, v in zip(names, expected, strict=True) if v is not None)
        raise RenderError(
            f"the header of {given} would be read as another one; each is one word, a tool's name is no role, "
            "a content type is 'json' or '<|constrain|>json'"
        )


def _library_message(message: Message) -> harmony.Message:
    """Return `message` in the types of openai-harmony."""
    author = harmony.Author(role=harmony.Role(message.role), name=_clean(message.name))
    if isinstance(message.content, System):
        content = _system_content(message.content)
    elif isinstance(message.content, Developer):
        content = _developer_content(message.content)
    else:
        content = harmony.TextContent(text=_clean(message.content))
    return harmony.Message(
        author=author,
        content=[content],
        channel=_clean(message.channel),
        recipient=_clean(message.recipient),
        content_type=_clean(message.content_type),
    )


def _system_content(system: System) -> harmony.SystemContent:
    content = harmony.SystemContent(
        model_identity=_clean(system.identity),
        reasoning_effort=None if system.reasoning is None else harmony.ReasoningEffort(system.reasoning.capitalize()),
        conversation_start_date=None if system.date is None else str(system.date),
        knowledge_cutoff=_clean(system.knowledge_cutoff),
    )
    for tool in system.builtin_tools:
        content = content.with_browser_tool() if tool == "browser" else content.with_python_tool()
    return content


def _developer_content(developer: Developer) -> harmony.DeveloperContent:
    content = harmony.DeveloperContent(instructions=_clean(developer.instructions) or None)
    if not developer.tools:
        return content
    return content.with_function_tools([_tool_description(tool) for tool in developer.tools])


def _tool_description(tool: Tool) -> harmony.ToolDescription:
    parameters = None if tool.parameters is None else dict(tool.parameters)
    return harmony.ToolDescription.new(tool.name, _clean(tool.description), parameters=parameters)


def _clean(text: str | None) -> str | None:
    """Return `text` with lone surrogates, which no UTF-8 can hold, replaced by U+FFFD."""
    return text if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
