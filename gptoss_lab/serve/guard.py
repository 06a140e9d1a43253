"""What every request meets first: its key, the size of its body, the time it takes to arrive, and the count of answers.

A plain ASGI middleware: a stream passes through it without a task or a queue of its own.
"""
from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptoss_lab.serve.errors import ApiError
from gptoss_lab.serve.metrics import Metrics
from gptoss_lab.serve.settings import Settings

OPEN_PATHS = ("/health",)
"""Paths that need no key."""


class Guard:
    """Around the whole application. metrics: where answers are counted by path and status."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._settings, self._metrics, self._paths = app, settings, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with a `receive` that keeps the limits."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        headers = {name: value for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            return await refusal.response()(scope, receive, counted)
        await self._app(scope, _Limited(receive, self._settings), counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        key = self._settings.api_key
        if key is not None and path not in OPEN_PATHS and not _allowed(headers.get(b"authorization", b""), key):
            return ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body:
            return too_large(self._settings.max_body)
        return None


class _Limited:
    """A `receive` that gives up a body which is too long, or too long in coming."""

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive, self._settings = receive, settings
        self._size, self._whole = 0, False
        self._until = asyncio.get_running_loop().time() + settings.body_timeout

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the request did not arrive within {self._settings.body_timeout:g} seconds",
                           code="timeout") from None
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > self._settings.max_body:
            raise too_large(self._settings.max_body)
        return message


def too_large(limit: int) -> ApiError:
    """413: more bytes than a request may have."""
    return ApiError(413, f"the request is longer than {limit} bytes", code="request_too_large")


def _allowed(given: bytes, key: str) -> bool:
    """Compared in constant time: how long it takes tells nothing about how much of a key is right."""
    scheme, _, value = given.partition(b" ")
    return hmac.compare_digest(value.strip(), key.encode()) and scheme.lower() == b"bearer"
