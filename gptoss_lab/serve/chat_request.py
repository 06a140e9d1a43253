"""The part of a chat completion request that is offered here. What is not offered is refused by name, never ignored."""
from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Text = Annotated[str, Field(max_length=4 * 2**20)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_\-.]{1,64}$")]


class Strict(BaseModel):
    """No conversions, no unknown fields; one that is null counts as absent, since some clients send all they know."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


Content = Text | list[TextPart]


class SystemMessage(Strict):
    """Instructions; "system" and "developer" are the same here."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What a user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(Strict):
    """name and arguments, as text, of a call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class ToolCallParam(Strict):
    """A call that the assistant made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Strict):
    """What the assistant said. reasoning: as it was given out; seen again only while a call is open."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning: Text | None = None
    tool_calls: list[ToolCallParam] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    name: str | None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class FunctionTool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class TextFormat(Strict):
    """The only format of answers."""

    type: Literal["text"]


class StreamOptions(Strict):
    """include_usage: a last chunk with the counts. include_obfuscation: padding of events, only off."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(Strict):
    """POST /v1/chat/completions.

    temperature 0 is greedy; 1, the default, the model's own distribution. parallel_tool_calls: the engine stops at the
    first call unless this is true. user, metadata, store: taken and not used.
    """

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
