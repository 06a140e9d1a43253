"""Messages of the chat API to messages of the chat format."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from gptoss_lab.harmony import Message, RenderError, Tool, assistant, developer, system, tool_call, tool_result, user
from gptoss_lab.serve.chat_request import (
    AssistantMessage,
    ChatRequest,
    Content,
    FunctionTool,
    SystemMessage,
    ToolMessage,
)
from gptoss_lab.serve.errors import bad_request
from gptoss_lab.serve.remembered import Remembered


def conversation(request: ChatRequest, date: str, remembered: Remembered) -> list[Message]:
    """Return what is to be rendered for a request.

    The leading instructions, joined, and the tools are the developer message; later instructions are one each. A turn
    with calls that we gave out is taken from memory with its reasoning and its own tokens. ApiError 400.
    """
    leading = 0
    while leading < len(request.messages) and isinstance(request.messages[leading], SystemMessage):
        leading += 1
    instructions = "\n\n".join(_text(message.content) for message in request.messages[:leading])
    tools = [] if request.tool_choice == "none" else described(request.tools or ())
    messages = [system(request.reasoning_effort or "medium", date)]
    if instructions or tools:
        messages.append(developer(instructions or None, tools))
    return messages + _history(request.messages[leading:], remembered, leading)


def described(tools: Sequence[FunctionTool]) -> list[Tool]:
    """The tools as the format describes them to the model. ApiError 400 for a name that is there twice."""
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise bad_request(f"tools has two functions called {tool.function.name!r}; each needs a name of its own",
                              "tools")
        names.add(tool.function.name)
    try:
        return [Tool(t.function.name, t.function.description or "", t.function.parameters) for t in tools]
    except RenderError as error:
        raise bad_request(str(error), "tools") from None


def _history(messages: Sequence[object], remembered: Remembered, start: int) -> list[Message]:
    history: list[Message] = []
    open_calls: dict[str, Message] = {}
    for index, message in enumerate(messages, start):
        if isinstance(message, SystemMessage):
            history.append(developer(_text(message.content)))
        elif isinstance(message, AssistantMessage):
            turn, calls = _turn(message, remembered)
            history += turn
            open_calls |= calls
        elif isinstance(message, ToolMessage):
            call = open_calls.get(message.tool_call_id)
            if call is None:
                raise bad_request(
                    f"message {index} of role 'tool' answers {message.tool_call_id!r:.100}; no earlier assistant "
                    "message has a tool call with this id", "messages")
            history.append(tool_result(call, _text(message.content)))
        else:
            history.append(user(_text(message.content)))
    return history


def _turn(message: AssistantMessage, remembered: Remembered) -> tuple[list[Message], dict[str, Message]]:
    """The messages of one turn of the assistant, and its calls by their ids."""
    given = message.tool_calls or []
    kept = remembered.get(given[0].id) if given else None
    if kept is not None and _same_calls(kept, message):
        calls = [m for m in kept if m.is_tool_call]
        return list(kept), {call.id: m for call, m in zip(given, calls, strict=True)}
    calls = {call.id: tool_call(f"functions.{call.function.name}", call.function.arguments) for call in given}
    turn = [assistant(message.reasoning, "analysis")] if message.reasoning else []
    content = _text(message.content) if message.content is not None else ""
    if content or not given:
        turn.append(assistant(content, "commentary" if given else "final"))
    return turn + list(calls.values()), calls


def _same_calls(kept: Sequence[Message], message: AssistantMessage) -> bool:
    """Whether the client sent back the calls of this turn, all of them and unchanged."""
    ours = [(m.recipient.removeprefix("functions."), m.content) for m in kept if m.is_tool_call]
    return ours == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(_parts(content))


def _parts(content: Sequence[object]) -> Iterator[str]:
    for part in content:
        yield part.text
