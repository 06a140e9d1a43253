"""The part of a /v1/responses request that is offered here. What is not offered is refused by name, never ignored."""
from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gptoss_lab.serve.chat_request import Name, Strict, Text

Status = Literal["in_progress", "completed", "incomplete"] | None


class InputText(Strict):
    """A part of what goes in, or of what came out and is sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A message of any role; one of the assistant is an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Text | list[InputText]
    phase: Literal["commentary", "final_answer"] | None = None
    id: str | None = None
    status: Status = None


class ReasoningText(Strict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Strict):
    """Earlier reasoning, sent back; seen again only while a call is open."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status = None


class FunctionCallItem(Strict):
    """An earlier call, sent back."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text
    id: str | None = None
    status: Status = None


class FunctionOutputItem(Strict):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text | list[InputText]
    id: str | None = None
    status: Status = None


def _kind(item: Any) -> str:
    """Which of the items it is; a message may leave its type out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")] | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")] | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponsesTool(Strict):
    """A function that the model may call; functions are the only kind of tool."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Reasoning(Strict):
    """How long the model is asked to think."""

    effort: Literal["low", "medium", "high"] | None = None
    summary: None = None


class PlainText(Strict):
    """The only format of answers."""

    type: Literal["text"]


class TextOptions(Strict):
    """Format of the answer."""

    format: PlainText | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses.

    previous_response_id: continues that conversation, with the model's own tokens; its instructions and tools are not
    carried over. store: whether this answer can be continued so, true unless told otherwise; kept in memory, the
    oldest forgotten first. include: "message.output_text.logprobs". user, metadata: taken and not used.
    """

    model: str
    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    reasoning: Reasoning | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
