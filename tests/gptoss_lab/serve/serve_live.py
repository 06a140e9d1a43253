"""A server that listens on loopback for as long as a test needs it, and an engine that says what it is told to."""
import asyncio
import contextlib
import functools
import os
import socket
import threading
import time

import openai
import uvicorn

from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, LogitsError, Loop
from gptoss_lab.engine.request import NewToken
from gptoss_lab.harmony import encode
from gptoss_lab.serve import Settings, create_app

CRASH, BAD_LOGITS = -1, -2
"""In a script: the engine's process ends here; the logits of this sequence are bad here."""


class Scripted:
    """A decoder that answers the last user text with what `script` has for it: ids, one a step.

    A text that the script lacks is answered by `fallback`. seconds: how long a step takes.
    """

    def __init__(self, script, fallback, seconds):
        self.script = {tuple(encode(text)): list(ids) for text, ids in script.items()}
        self.fallback, self.seconds = list(fallback), seconds

    def start(self, request):
        request.state = next((ids for text, ids in self.script.items() if _ends_with(request.tokens, text)),
                             self.fallback)

    def step(self, batch):
        time.sleep(self.seconds)
        return [[self._next(request)] for request in batch]

    def _next(self, request):
        written = len(request.tokens) - request.prompt_length
        token = request.state[written] if written < len(request.state) else 200002
        if token == CRASH:
            os._exit(7)
        if token == BAD_LOGITS:
            raise LogitsError("the logits are nan", request.index)
        wanted = request.params.logprobs or request.params.top_logprobs
        top = tuple((token + i, -0.25 - i) for i in range(request.params.top_logprobs))
        return NewToken(token, -0.25 if wanted else None, top)


def _ends_with(tokens, text):
    """Whether the last body of the prompt is `text`: from <|message|>, or a line break, to <|end|> or <im_end>."""
    end = max(i for i, token in enumerate(tokens) if token in (200007, 200014))
    begin = end - len(text)
    return tuple(tokens[begin:end]) == text and tokens[begin - 1] in (200008, 198)


def scripted_loop(script, fallback, seconds=0.0, max_batch=64):
    """Made in the engine's process."""
    engine = Engine(_Shape(), Scripted(script, fallback, seconds))
    return Loop(engine, max_batch)


class _Shape:
    """What the engine asks of a model when the decoder needs none."""

    config = preset("nano")


def ids(text):
    """The ids of a text in which special tokens are spelled."""
    return encode(text, special=True)


FINAL = ids("<|channel|>final<|message|>fine<|return|>")


def scripted(script=None, fallback=FINAL, **options):
    """A `build` for `serving`."""
    return functools.partial(scripted_loop, script or {}, fallback, **options)


class Live:
    """A running server: `url`, `client` (the official one), `server` (what the requests share)."""

    def __init__(self, app, port):
        self.app, self.server, self.url = app, app.state.server, f"http://127.0.0.1:{port}"
        self.port = port
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def wait(self, condition, seconds=20.0):
        """Until `condition()` is true; an assertion error when it does not become so."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(build, **settings):
    """Run a server in a thread of this process, its engine in a process of its own."""
    app = create_app(Settings(**{"model": "nano", "date": "2025-06-28", **settings}), build)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    until = time.monotonic() + 120
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    live = Live(app, listening.getsockname()[1])
    try:
        yield live
    finally:
        live.client.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
