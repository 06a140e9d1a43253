"""What can go wrong in front of an engine, each in the shape that clients of this API know.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}} with an HTTP status; inside a stream that has begun,
the same object as an event of the stream.
"""
from __future__ import annotations

import json
from typing import Any

from openai.types.shared import ErrorObject
from starlette.exceptions import HTTPException
from starlette.responses import Response


class ApiError(HTTPException):
    """An error with a status, a message of one line, a type, a code and the parameter that it is about."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        kind: str = "invalid_request_error", headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.error = ErrorObject(message=message, type=kind, code=code, param=param)

    def body(self) -> dict[str, Any]:
        """The JSON of this error."""
        return {"error": self.error.model_dump(exclude_unset=True)}

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(json.dumps(self.body()), self.status_code, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: what was asked cannot be done."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, value: object, expected: str) -> ApiError:
    """400: a part of the protocol that is not offered here. Nothing is ignored in silence."""
    return bad_request(f"{param} is {_shown(value)}; this server supports {expected}", param, "unsupported_value")


def overloaded(running: int, limit: int) -> ApiError:
    """429: no row and no place in the queue."""
    return ApiError(429, f"{running} requests are being answered or waiting, the limit is {limit}; try again later",
                    code="overloaded", kind="rate_limit_error", headers={"Retry-After": "1"})


def engine_down(reason: str) -> ApiError:
    """503: there is no engine at the moment."""
    return ApiError(503, reason, code="engine_unavailable", kind="server_error", headers={"Retry-After": "2"})


def engine_failed(reason: str) -> ApiError:
    """500: the engine gave up this request alone."""
    return ApiError(500, reason, code="engine_error", kind="server_error")


def timed_out(seconds: float) -> ApiError:
    """504: the whole answer took too long."""
    return ApiError(504, f"the answer was not finished within {seconds:g} seconds", code="timeout",
                    kind="server_error")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
