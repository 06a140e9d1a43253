"""The tokens of one request on their way from the engine to whoever answers it.

The dispatcher puts tokens in and never waits; the request takes all that is there. So a client that reads slowly keeps
its own tokens here, at most as many as it asked for, and holds up nobody.
"""
from __future__ import annotations

import asyncio

from gptoss_lab.serve.errors import ApiError
from gptoss_lab.serve.wire import Token


class Stream:
    """Made by `EngineProcess.submit`; used inside one event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self._tokens: list[Token] = []
        self._error: ApiError | None = None
        self._news = asyncio.Event()

    def put(self, token: Token) -> None:
        """One more token; its `finish` says whether it is the last."""
        self._tokens.append(token)
        self.ended = token.finish is not None
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """No more tokens, for this reason."""
        self._error, self.ended = error, True
        self._news.set()

    async def take(self) -> list[Token]:
        """All tokens that have come since the last call, at least one. Raises what the stream failed with."""
        while not self._tokens:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return tokens
