"""POST /v1/responses: the answer as a list of items, whole and streamed, in the types of the `openai` package.

A reasoning item, a message (phase "commentary" for remarks before a call), a function call: one item for each message
that the model writes, in its order. The stream is the same items as they grow.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from openai.types import responses as types
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from starlette.requests import Request
from starlette.responses import Response

from gptoss_lab.harmony import Message
from gptoss_lab.serve.answer import CALL, CONTENT, CUT, REASONING, Closed, Opened, Piece, merged
from gptoss_lab.serve.errors import ApiError, bad_request
from gptoss_lab.serve.generation import Generation, Server, Wanted
from gptoss_lab.serve.items import history, opening
from gptoss_lab.serve.logprobs import named
from gptoss_lab.serve.responses_request import ResponsesRequest
from gptoss_lab.serve.sse import EventStream, event, whole
from gptoss_lab.serve.wire import Token

LOGPROBS = "message.output_text.logprobs"
_IDS = {REASONING: "rs", CONTENT: "msg", CALL: "fc"}


async def create(server: Server, request: ResponsesRequest, http: Request) -> Response:
    """Answer one request. ApiError before anything is sent; inside a stream it becomes response.failed."""
    server.check_model(request.model)
    wanted = _wanted(request)
    said = history(request, server.remembered)
    generation = await server.begin([*opening(request, server.settings.today()), *said], wanted)
    response = _Response(server, request, generation, said)
    if request.stream:
        return EventStream(response.stream(), server.settings.send_timeout, generation.release)
    try:
        return await whole(response.collect(), http)
    finally:
        generation.release()


def _wanted(request: ResponsesRequest) -> Wanted:
    logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not logprobs:
        raise bad_request(f"top_logprobs is only for include=[{LOGPROBS!r}]", "top_logprobs")
    return Wanted(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p, tokens=request.max_output_tokens,
        many_calls=bool(request.parallel_tool_calls), logprobs=logprobs, top_logprobs=request.top_logprobs or 0,
    )


class _Response:
    """The answer to one request in the shapes of this API."""

    def __init__(
        self, server: Server, request: ResponsesRequest, generation: Generation, said: Sequence[Message]
    ) -> None:
        self.server, self.request, self.generation, self.said = server, request, generation, said
        self.id, self.created = f"resp_{secrets.token_hex(16)}", time.time()
        self.output: list[dict[str, Any]] = []
        self._number = 0

    async def collect(self) -> Response:
        """The whole answer as one JSON object."""
        async with aclosing(self.generation.pieces()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    self._take(piece)
        self._remember()
        return Response(self._object().model_dump_json(exclude_unset=True), media_type="application/json")

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; a failure is the last one."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object("in_progress"))
        try:
            async with aclosing(self.generation.pieces()) as batches:
                async for pieces in batches:
                    events = [e for piece in merged(pieces) for e in self._take(piece)]
                    if events:
                        yield b"".join(events)
        except ApiError as error:
            yield self._event("response.failed", response=self._object("failed", error))
            return
        self._remember()
        last = self._object()
        yield self._event(f"response.{last.status}", response=last)

    def _take(self, piece: Piece) -> list[bytes]:
        """Let the output grow by a piece, and say so in events (none of them are made unless the answer streams)."""
        if isinstance(piece, Opened):
            return self._open(piece)
        if isinstance(piece, Closed):
            return self._close(piece)
        item, place = self.output[-1], self._place()
        if piece.kind == CALL:
            item["arguments"] += piece.text
            return self._events(("response.function_call_arguments.delta", {**place, "delta": piece.text}))
        part = item["content"][0]
        part["text"] += piece.text
        if piece.kind == REASONING:
            return self._events(("response.reasoning_text.delta", {**place, "content_index": 0, "delta": piece.text}))
        logprobs = [self._logprob(token) for token in piece.tokens if token.logprob is not None]
        part["logprobs"] += logprobs
        return self._events(("response.output_text.delta", {**place, "content_index": 0, "delta": piece.text,
                                                            "logprobs": list(map(_short, logprobs))}))

    def _open(self, piece: Opened) -> list[bytes]:
        item: dict[str, Any] = {"id": f"{_IDS[piece.kind]}_{secrets.token_hex(12)}", "status": "in_progress"}
        if piece.kind == CALL:
            item |= {"type": "function_call", "call_id": f"call_{secrets.token_hex(12)}", "name": piece.name,
                     "arguments": ""}
        elif piece.kind == REASONING:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            phase = "commentary" if piece.channel == "commentary" else "final_answer"
            item |= {"type": "message", "role": "assistant", "phase": phase, "content": []}
        self.output.append(item)
        events = self._events(("response.output_item.added", {"output_index": len(self.output) - 1, "item": item}))
        if piece.kind == CALL:
            return events
        part = {"type": "reasoning_text", "text": ""} if piece.kind == REASONING else {
            "type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        return events + self._events(
            ("response.content_part.added", {**self._place(), "content_index": 0, "part": part}))

    def _close(self, piece: Closed) -> list[bytes]:
        item, place = self.output[-1], self._place()
        item["status"] = "completed" if piece.message.end is not None else "incomplete"
        done = ("response.output_item.done", {"output_index": place["output_index"], "item": item})
        if piece.kind == CALL:
            self.server.remembered.put(item["call_id"], [piece.message])
            return self._events(
                ("response.function_call_arguments.done",
                 {**place, "name": item["name"], "arguments": item["arguments"]}), done)
        part = item["content"][0]
        text = {**place, "content_index": 0, "text": part["text"]}
        said = ("response.reasoning_text.done", text) if piece.kind == REASONING else (
            "response.output_text.done", {**text, "logprobs": list(map(_short, part["logprobs"]))})
        return self._events(said, ("response.content_part.done", {**place, "content_index": 0, "part": part}), done)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _events(self, *events: tuple[str, dict[str, Any]]) -> list[bytes]:
        return [self._event(name, **fields) for name, fields in events] if self.request.stream else []

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        made = _TYPES[kind](type=kind, sequence_number=self._number, **fields)
        self._number += 1
        return event(made.model_dump_json(exclude_unset=True), kind)

    def _object(self, status: str | None = None, error: ApiError | None = None) -> types.Response:
        """The response as it is now. status: None when it is over."""
        request, answer = self.request, self.generation.answer
        cut = answer.finish in CUT
        status = status or ("incomplete" if cut else "completed")
        return types.Response.model_validate({
            "id": self.id, "object": "response", "created_at": self.created, "model": request.model, "status": status,
            "output": self.output if status != "in_progress" else [],
            "error": None if error is None else {"code": "server_error", "message": error.error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions, "metadata": request.metadata or {},
            "parallel_tool_calls": bool(request.parallel_tool_calls), "tool_choice": request.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": {}, **tool.model_dump(exclude_none=True)}
                      for tool in request.tools or ()],
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p, "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None},
            "usage": self._usage() if status in ("completed", "incomplete") else None,
        })

    def _usage(self) -> types.ResponseUsage:
        answer, prompt = self.generation.answer, self.generation.prompt_tokens
        return types.ResponseUsage(
            input_tokens=prompt, output_tokens=answer.generated, total_tokens=prompt + answer.generated,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=answer.reasoned),
        )

    def _logprob(self, token: Token) -> dict[str, Any]:
        chat = self.server.chat
        return {**named(chat, token.token, token.logprob), "top_logprobs": [named(chat, *other) for other in token.top]}

    def _remember(self) -> None:
        if self.request.store is not False:
            turn = [message for message in self.generation.answer.messages if message.role == "assistant"]
            self.server.remembered.put(self.id, [*self.said, *turn])


def _short(logprob: dict[str, Any]) -> dict[str, Any]:
    """A log-probability as the events of a stream have it: without bytes."""
    return {"token": logprob["token"], "logprob": logprob["logprob"],
            "top_logprobs": [{"token": t["token"], "logprob": t["logprob"]} for t in logprob["top_logprobs"]]}


_TYPES: dict[str, Any] = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
}
