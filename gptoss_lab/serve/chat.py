"""POST /v1/chat/completions: whole and streamed, in the types of the `openai` package.

Reasoning stands apart, in `message.reasoning` and `delta.reasoning` (fields that the package's types let through);
`content` is the answer. Messages of one kind are joined with an empty line. The tokens of `logprobs.content` are those
of the answer's text; markers, reasoning and calls have none.
"""
from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_usage import CompletionTokensDetails
from starlette.requests import Request
from starlette.responses import Response

from gptoss_lab.harmony.formats import ChatFormat
from gptoss_lab.serve.answer import CALL, CONTENT, CUT, REASONING, Answer, Grown, Opened, Piece, merged
from gptoss_lab.serve.chat_request import ChatRequest
from gptoss_lab.serve.conversation import conversation
from gptoss_lab.serve.errors import ApiError, bad_request
from gptoss_lab.serve.generation import Generation, Server, Wanted
from gptoss_lab.serve.logprobs import named
from gptoss_lab.serve.sse import EventStream, event, whole
from gptoss_lab.serve.wire import Token

BETWEEN = "\n\n"
"""What stands between two messages of one kind."""


async def create(server: Server, request: ChatRequest, http: Request) -> Response:
    """Answer one request. ApiError before anything is sent; inside a stream the error is its last event."""
    server.check_model(request.model)
    wanted = _wanted(request)
    messages = conversation(request, server.settings.today(), server.remembered)
    generation = await server.begin(messages, wanted)
    completion = _Completion(server, request, generation)
    if request.stream:
        return EventStream(completion.stream(), server.settings.send_timeout, generation.release)
    try:
        return await whole(completion.collect(), http)
    finally:
        generation.release()


def _wanted(request: ChatRequest) -> Wanted:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only for stream=true", "stream_options")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs is only for logprobs=true", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise bad_request("max_tokens and max_completion_tokens are the same; give one of them", "max_tokens")
    return Wanted(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=None if request.seed is None else request.seed % 2**64,
        tokens=request.max_completion_tokens or request.max_tokens,
        many_calls=bool(request.parallel_tool_calls), logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
    )


class _Completion:
    """The answer to one request in the shapes of this API."""

    def __init__(self, server: Server, request: ChatRequest, generation: Generation) -> None:
        self.server, self.request, self.generation = server, request, generation
        self.answer = generation.answer
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self.call_ids: list[str] = []
        self._opened: set[str] = set()  # kinds of which a message has begun

    async def collect(self) -> Response:
        """The whole answer as one JSON object."""
        texts: dict[str, list[str]] = {REASONING: [], CONTENT: [], CALL: []}
        names: list[str] = []
        logprobs: list[ChatCompletionTokenLogprob] = []
        async with aclosing(self.generation.pieces()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    if isinstance(piece, Opened):
                        texts[piece.kind].append("")
                        names += [piece.name] if piece.kind == CALL else []
                    elif isinstance(piece, Grown):
                        texts[piece.kind][-1] += piece.text
                        logprobs += _logprobs(self.server.chat, piece.tokens)
        self.call_ids = [_call_id() for _ in names]
        self._remember()
        message = ChatCompletionMessage.model_validate({
            "role": "assistant", "content": BETWEEN.join(texts[CONTENT]) if texts[CONTENT] else None, "refusal": None,
            **({"reasoning": BETWEEN.join(texts[REASONING])} if texts[REASONING] else {}),
            **({"tool_calls": [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": text}}
                for id_, name, text in zip(self.call_ids, names, texts[CALL], strict=True)
            ]} if names else {}),
        })
        choice = Choice(index=0, message=message, finish_reason=_finish_reason(self.answer), logprobs=(
            ChoiceLogprobs(content=logprobs, refusal=None) if self.request.logprobs else None))
        whole_answer = ChatCompletion(id=self.id, object="chat.completion", created=self.created,
                                      model=self.request.model, choices=[choice], usage=usage(self.generation))
        return Response(whole_answer.model_dump_json(exclude_unset=True), media_type="application/json")

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks, then [DONE]; an error is the last event of a stream that fails."""
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            async with aclosing(self.generation.pieces()) as batches:
                async for pieces in batches:
                    chunks = [chunk for piece in merged(pieces) for chunk in self._chunks(piece)]
                    if chunks:
                        yield b"".join(chunks)
        except ApiError as error:
            yield event(json.dumps(error.body()))
            return
        self._remember()
        yield self._chunk({}, finish_reason=_finish_reason(self.answer))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._event(choices=[], usage=usage(self.generation))
        yield event("[DONE]")

    def _chunks(self, piece: Piece) -> Sequence[bytes]:
        if isinstance(piece, Opened):
            return self._open(piece)
        if not isinstance(piece, Grown):
            return ()
        if piece.kind == CALL:
            return [self._chunk({"tool_calls": [{"index": len(self.call_ids) - 1,
                                                 "function": {"arguments": piece.text}}]})]
        return [self._chunk({piece.kind: piece.text}, piece.tokens)]

    def _open(self, piece: Opened) -> Sequence[bytes]:
        """A call is announced with its id and name; of other kinds the second begins with an empty line."""
        if piece.kind == CALL:
            self.call_ids.append(_call_id())
            call = {"index": len(self.call_ids) - 1, "id": self.call_ids[-1], "type": "function",
                    "function": {"name": piece.name, "arguments": ""}}
            return [self._chunk({"tool_calls": [call]})]
        again = piece.kind in self._opened
        self._opened.add(piece.kind)
        return [self._chunk({piece.kind: BETWEEN})] if again else ()

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[Token] = (), finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if self.request.logprobs:
            content = _logprobs(self.server.chat, tokens)
            choice["logprobs"] = {"content": content, "refusal": None} if content else None
        return self._event(choices=[ChunkChoice.model_validate(choice)])

    def _event(self, **fields: Any) -> bytes:
        chunk = ChatCompletionChunk(id=self.id, object="chat.completion.chunk", created=self.created,
                                    model=self.request.model, **fields)
        return event(chunk.model_dump_json(exclude_unset=True))

    def _remember(self) -> None:
        """Keep a turn that called tools under the ids of its calls, if all of them are whole."""
        calls = self.answer.calls
        if calls and len(calls) == len(self.call_ids):
            turn = [message for message in self.answer.messages if message.role == "assistant"]
            self.server.remembered.put(self.call_ids[0], turn)


def usage(generation: Generation) -> CompletionUsage:
    """Counts of one answer; reasoning is a part of what was generated."""
    answer = generation.answer
    return CompletionUsage(
        prompt_tokens=generation.prompt_tokens, completion_tokens=answer.generated,
        total_tokens=generation.prompt_tokens + answer.generated,
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=answer.reasoned),
    )


def _finish_reason(answer: Answer) -> str:
    if answer.finish in CUT:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _logprobs(chat: ChatFormat, tokens: Sequence[Token]) -> list[ChatCompletionTokenLogprob]:
    """The log-probabilities of tokens that have one."""
    return [
        ChatCompletionTokenLogprob(**named(chat, token.token, token.logprob),
                                   top_logprobs=[TopLogprob(**named(chat, *other)) for other in token.top])
        for token in tokens if token.logprob is not None
    ]


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


