"""The application: routes, what errors look like, and the engine that lives as long as it does."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from openai.types import Model
from openai.types import responses as types
from openai.types.chat import ChatCompletion
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gptoss_lab.engine import Loop
from gptoss_lab.harmony import user
from gptoss_lab.serve import chat, responses
from gptoss_lab.serve.chat_request import ChatRequest
from gptoss_lab.serve.engine_process import READY, EngineProcess
from gptoss_lab.serve.errors import ApiError
from gptoss_lab.serve.generation import Server
from gptoss_lab.serve.guard import Guard
from gptoss_lab.serve.responses_request import ResponsesRequest
from gptoss_lab.serve.settings import Settings, SettingsError


class ErrorBody(BaseModel):
    """How every error looks."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The JSON of an error."""

    error: ErrorBody


class ModelList(BaseModel):
    """The models that are offered."""

    object: str = "list"
    data: list[Model]


EVENTS = {"content": {"text/event-stream": {"schema": {}}}}
"""What an answer is besides JSON: with stream=true."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in {
        400: "What was asked cannot be done.", 401: "Key missing or wrong.", 404: "No such model.",
        405: "Another method is expected.", 408: "The request did not arrive in time.", 413: "The body is too long.",
        422: "Not used; validation answers 400.", 429: "All places are taken.", 500: "The engine gave up.",
        503: "There is no engine at the moment.", 504: "The answer took too long.",
    }.items()
}


def create_app(settings: Settings, build: Callable[[], Loop]) -> FastAPI:
    """Return the application for one server.

    build: makes the engine's loop; called in the engine's own process, so it can be pickled. The engine starts with the
    application (EngineStartError when it does not) and ends with it. `app.state.server` is the `Server`;
    `app.state.running()` is what the lifespan does, for whoever runs the application without one.
    """
    engine = EngineProcess(build, settings.restarts)
    server = Server(settings, engine)

    @asynccontextmanager
    async def running(app: FastAPI | None = None) -> AsyncIterator[None]:
        await asyncio.to_thread(server.chat.render, [user("")])  # loads the vocabulary, or says why it cannot
        info = await engine.start()
        try:
            _check_vocabulary(server, info.vocabulary)
            yield
        finally:
            await engine.stop()

    app = FastAPI(title="gptoss-lab", lifespan=running, docs_url=None, redoc_url=None)
    app.state.server, app.state.running = server, running
    _add_routes(app, server)
    _add_errors(app)
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(Guard, settings=settings, metrics=server.metrics, paths=paths)
    return app


def _check_vocabulary(server: Server, size: int) -> None:
    """SettingsError unless the model has the ids that the chat format ends its messages with."""
    largest = max(server.chat.stop_ids(stop_at_call=True))
    if largest >= size:
        raise SettingsError(f"chat format {server.settings.chat_format!r} writes id {largest}; the model has ids "
                            f"0..{size - 1}, so it needs another format")


def _add_routes(app: FastAPI, server: Server) -> None:
    settings = server.settings

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, **EVENTS}, **REFUSALS})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat.create(server, body, request)

    @app.post("/v1/responses", responses={200: {"model": types.Response, **EVENTS}, **REFUSALS})
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await responses.create(server, body, request)

    @app.get("/v1/models", responses={200: {"model": ModelList}, 401: REFUSALS[401]})
    async def models() -> Response:
        return JSONResponse(ModelList(data=[_model(server)]).model_dump())

    @app.get("/v1/models/{model}", responses={200: {"model": Model}, 401: REFUSALS[401], 404: REFUSALS[404]})
    async def model(model: str) -> Response:
        server.check_model(model)
        return JSONResponse(_model(server).model_dump())

    @app.get("/health", responses={503: {"description": "There is no engine at the moment."}})
    async def health() -> Response:
        engine = server.engine
        state = {"status": engine.state, "reason": engine.reason, "model": settings.model,
                 "chat_format": settings.chat_format, "context": server.longest, "open": server.open}
        return JSONResponse(state, 200 if engine.state == READY else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: REFUSALS[401]})
    async def metrics() -> Response:
        server.metrics.engine_up.set(server.engine.state == READY)
        server.metrics.engine_deaths.set(server.engine.deaths)
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _model(server: Server) -> Model:
    return Model(id=server.settings.model, created=server.started, object="model", owned_by="gptoss-lab")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        worst = max(error.errors(), key=lambda one: len(one["loc"]))  # of a union, the member that it was meant to be
        if worst["type"] == "json_invalid":                             # its place is a character of the body
            text = f"the body is not JSON (character {worst['loc'][-1]}: {worst['ctx']['error']})"
            return ApiError(400, text, code=worst["type"]).response()
        where = ".".join(part for part in map(str, worst["loc"]) if part not in ("body", "constrained-str")
                         and "[" not in part)
        return ApiError(400, f"{where or 'body'}: {worst['msg']}", param=where or None, code=worst["type"]).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server made an error; its log says which", code="internal_error",
                        kind="server_error").response()
