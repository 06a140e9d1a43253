"""A JSON API in front of an engine: the endpoints that clients of OpenAI's API know, any chat format behind them.

    app = create_app(Settings(model="nano"), functools.partial(load_loop, path))     # an ASGI application
    gptoss-lab serve --checkpoint PATH                                               # the same from the command line

    settings.py         name, limits, key
    app.py              routes and errors
    guard.py            key, body size, arrival time
    chat.py             /v1/chat/completions: chat_request.py says which part of it is offered, what is not is refused
                        by name; conversation.py turns its messages into those of the chat format
    responses.py        /v1/responses, with responses_request.py and items.py
    generation.py       a request on its way: admitted, rendered, run, released
    answer.py           token ids to reasoning, content and calls as they grow
    sse.py              events to a client that may leave or stop reading
    engine_process.py   the engine in its own process: its death is survived, it is started again
    worker.py wire.py   the other side of the pipe, and what goes through it
    stream.py           the tokens of one request between the two
    remembered.py       what the model wrote, for the next request of the conversation
    metrics.py errors.py loading.py
"""
from importlib import import_module
from typing import Any

_HOME = {"EngineProcess": "engine_process", "EngineStartError": "engine_process", "Settings": "settings",
         "SettingsError": "settings", "create_app": "app", "load_loop": "loading"}
__all__ = ["EngineProcess", "EngineStartError", "Settings", "SettingsError", "create_app", "load_loop"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the engine's process imports worker.py from here and starts faster without HTTP."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
