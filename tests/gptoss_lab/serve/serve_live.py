"""A server that listens on loopback for as long as a test needs it."""
import asyncio
import contextlib
import socket
import threading
import time

import openai
import uvicorn

from gptoss_lab.serve import Settings, create_app


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
