"""One request on its way through the server: admitted, rendered, sent to the engine, read to its end, released."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gptoss_lab.engine import SamplingParams
from gptoss_lab.harmony import HarmonyError, Message
from gptoss_lab.harmony.formats import ChatFormat, choose_format
from gptoss_lab.serve.answer import Answer, Piece
from gptoss_lab.serve.engine_process import READY, EngineProcess
from gptoss_lab.serve.errors import ApiError, bad_request, engine_down, overloaded, timed_out
from gptoss_lab.serve.metrics import Metrics
from gptoss_lab.serve.remembered import Remembered
from gptoss_lab.serve.settings import Settings
from gptoss_lab.serve.stream import Stream


class Server:
    """What all requests share."""

    def __init__(self, settings: Settings, engine: EngineProcess) -> None:
        self.settings, self.engine = settings, engine
        self.chat: ChatFormat = choose_format(settings.chat_format)
        self.metrics, self.remembered = Metrics(), Remembered()
        self.started = int(time.time())
        self.open = 0

    def check_model(self, name: str) -> None:
        """ApiError 404 for any other model than the one that is offered."""
        if name != self.settings.model:
            raise ApiError(404, f"model {name!r:.100} does not exist; this server has {self.settings.model!r}",
                           code="model_not_found", param="model")

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together: the limit that was set, or the model's own."""
        info = self.engine.info
        return self.settings.max_context if info is None else min(self.settings.max_context, info.positions)

    async def begin(self, messages: Sequence[Message], wanted: Wanted) -> Generation:
        """Admit a request, render it and start it. The caller releases what is returned, whatever happens.

        ApiError: 400 for a prompt that cannot be rendered or is too long, 429 when all places are taken, 503 without
        an engine.
        """
        limit = self.settings.max_running + self.settings.max_queue
        if self.open >= limit:
            raise overloaded(self.open, limit)
        if self.engine.state != READY:
            raise engine_down(self.engine.reason)
        self.count(1)
        try:
            prompt = await self._render(messages)
            return Generation(self, self.engine.submit(prompt, self._params(wanted, len(prompt))), len(prompt))
        except BaseException:
            self.count(-1)
            raise

    def count(self, change: int) -> None:
        """One more answer in the making, or one less."""
        self.open += change
        self.metrics.open.set(self.open)

    async def _render(self, messages: Sequence[Message]) -> list[int]:
        try:
            # In a thread: a long prompt takes a while, and other streams must not wait for it.
            return await asyncio.to_thread(self.chat.render, messages)
        except HarmonyError as error:
            raise bad_request(str(error), "messages") from None

    def _params(self, wanted: Wanted, prompt: int) -> SamplingParams:
        room = self.longest - prompt
        if room < 1:
            raise bad_request(
                f"the prompt has {prompt} tokens; prompt and answer together may have {self.longest}", "messages",
                "context_length_exceeded")
        return SamplingParams(
            temperature=wanted.temperature, top_p=wanted.top_p, seed=wanted.seed,
            max_new_tokens=min(wanted.tokens or self.settings.default_tokens, room),
            stop_ids=tuple(sorted(self.chat.stop_ids(stop_at_call=not wanted.many_calls))),
            logprobs=wanted.logprobs, top_logprobs=wanted.top_logprobs,
        )


@dataclass(frozen=True)
class Wanted:
    """How an answer is to be found, whichever API asked. tokens: None takes the server's default."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    tokens: int | None = None
    many_calls: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


class Generation:
    """An answer that is being written. prompt_tokens: length of its prompt. answer: what there is of it."""

    def __init__(self, server: Server, stream: Stream, prompt_tokens: int) -> None:
        self.prompt_tokens, self.answer = prompt_tokens, Answer(server.chat)
        self._server, self._stream, self._began = server, stream, time.monotonic()
        self._released = False

    def release(self) -> None:
        """Give the place back, and tell the engine unless it has ended the answer. Only the first call counts."""
        if not self._released:
            self._released = True
            self._server.count(-1)
            self._server.engine.release(self._stream)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What the engine found, as it comes, until the answer has ended.

        ApiError 504 when it takes too long, and what the engine reported.
        """
        metrics, timeout = self._server.metrics, self._server.settings.request_timeout
        until = asyncio.get_running_loop().time() + timeout
        metrics.prompt_tokens.inc(self.prompt_tokens)
        try:
            while self.answer.finish is None:
                async with asyncio.timeout_at(until):
                    tokens = await self._stream.take()
                if self.answer.generated == 0:
                    metrics.first_token.observe(time.monotonic() - self._began)
                metrics.generated_tokens.inc(len(tokens))
                yield self.answer.feed(tokens)
        except TimeoutError:
            raise timed_out(timeout) from None
        finally:
            metrics.finished.labels(self.answer.finish or "broken off").inc()
            metrics.whole.observe(time.monotonic() - self._began)
