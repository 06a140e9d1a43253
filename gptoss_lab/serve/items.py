"""Items of the responses API to messages of the chat format."""
from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.harmony import Message, assistant, developer, system, tool_call, tool_result, user
from gptoss_lab.serve.chat_request import Function, FunctionTool
from gptoss_lab.serve.conversation import described
from gptoss_lab.serve.errors import ApiError, bad_request
from gptoss_lab.serve.remembered import Remembered
from gptoss_lab.serve.responses_request import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)


def opening(request: ResponsesRequest, date: str) -> list[Message]:
    """The system message, and the developer message where there are instructions or tools."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    tools = [] if request.tool_choice == "none" else described([
        FunctionTool(type="function", function=Function(
            name=tool.name, description=tool.description, parameters=tool.parameters))
        for tool in request.tools or ()
    ])
    first = [system(effort or "medium", date)]
    return [*first, developer(request.instructions, tools)] if request.instructions or tools else first


def history(request: ResponsesRequest, remembered: Remembered) -> list[Message]:
    """What was said before, as it is remembered, and the new input. ApiError: 404 for what is forgotten, 400."""
    said: list[Message] = []
    if request.previous_response_id is not None:
        kept = remembered.get(request.previous_response_id)
        if kept is None:
            raise ApiError(404, f"response {request.previous_response_id!r:.100} is not known (any more)",
                           code="previous_response_not_found", param="previous_response_id")
        said += kept
    if isinstance(request.input, str):
        return [*said, user(request.input)]
    calls: dict[str, Message] = {}
    continued = {id(message) for message in said}
    for item in request.input:
        said.append(_message(item, continued, calls, remembered))
    return said


def _message(item: object, continued: set[int], calls: dict[str, Message], remembered: Remembered) -> Message:
    if isinstance(item, MessageItem):
        return _said(item)
    if isinstance(item, ReasoningItem):
        return assistant("\n\n".join(part.text for part in item.content or ()), "analysis")
    if isinstance(item, FunctionCallItem):
        calls[item.call_id] = tool_call(f"functions.{item.name}", item.arguments)
        return calls[item.call_id]
    return tool_result(_call(item, continued, calls, remembered), _text(item.output))


def _call(
    item: FunctionOutputItem, continued: set[int], calls: dict[str, Message], remembered: Remembered
) -> Message:
    """The call that an output answers: in the input, or one of the very messages that are continued."""
    if item.call_id in calls:
        return calls[item.call_id]
    for kept in remembered.get(item.call_id) or ():
        if id(kept) in continued:
            return kept
    raise bad_request(f"function_call_output answers {item.call_id!r:.100}; no earlier function_call has this call_id",
                      "input")


def _said(item: MessageItem) -> Message:
    text = _text(item.content)
    if item.role == "user":
        return user(text)
    if item.role == "assistant":
        return assistant(text, "commentary" if item.phase == "commentary" else "final")
    return developer(text)


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
