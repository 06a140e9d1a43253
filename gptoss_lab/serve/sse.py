"""Answers that may never be read: server-sent events, and whole answers whose client may have left.

Both watch the connection while they work. When the client leaves, the work is cancelled, and with it the request in the
engine; a client that stays but does not read is given `send_timeout` seconds.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: str, name: str | None = None) -> bytes:
    """One server-sent event; `data` is one line."""
    return f"event: {name}\ndata: {data}\n\n".encode() if name else f"data: {data}\n\n".encode()


class EventStream(Response):
    """A response made of events as they come. chunks: a generator of bytes; release: called at the end in any case."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], send_timeout: float, release: Callable[[], None]
    ) -> None:
        super().__init__(None, headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._chunks, self._send_timeout, self._release = chunks, send_timeout, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client leaves, or it stops reading."""
        try:
            await until_gone(self._write(send), receive)
        finally:
            self._release()
            await self._chunks.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            async with asyncio.timeout(self._send_timeout):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole(work: Awaitable[Response], request: Request) -> Response:
    """Return what `work` returns; when the client leaves first, cancel it (nobody sees what is returned then)."""
    done = await until_gone(work, request.receive)
    return Response(status_code=499) if done is None else done


async def until_gone(work: Awaitable[Response | None], receive: Receive) -> Response | None:
    """Await `work` while the client is there. Returns its result, or None when the client left and it was cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
