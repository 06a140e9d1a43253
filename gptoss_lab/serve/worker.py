"""The engine's own process: takes requests from a pipe, runs the loop, sends tokens back. It knows no HTTP and no text.

It ends when it is told to or when the pipe is closed, so it never outlives the front end. What it cannot handle ends
the process: the front end notices, says so to those who wait, and starts another.
"""
from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from gptoss_lab.engine import EngineError, Failure, Loop
from gptoss_lab.serve.wire import Broken, Cancel, Ready, Refused, Stop, Submit, Token, Tokens


def main(connection: Connection, build: Callable[[], Loop]) -> None:
    """Make a loop with `build` and serve it over `connection` until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides when to stop
    try:
        loop = build()
    except Exception as error:
        connection.send(_last_word(error))
        raise SystemExit(1) from None  # the front end says it; a traceback beside it would say it twice
    try:
        connection.send(Ready(loop.engine.config.vocab_size, loop.engine.config.max_position_embeddings))
        run(connection, loop)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        connection.send(_last_word(error))
        raise


def run(connection: Connection, loop: Loop) -> None:
    """Step while there is work, listen between the steps, wait when idle. Returns on `Stop`; EOFError when closed."""
    while True:
        while connection.poll(None if loop.idle else 0):
            message = connection.recv()
            if isinstance(message, Stop):
                return
            _obey(message, loop, connection)
        events = loop.step()
        found = [Token(e.sequence, e.token, e.logprob, e.finish, e.top) for e in events if not isinstance(e, Failure)]
        if found:
            connection.send(Tokens(found))
        for event in events:
            if isinstance(event, Failure):
                connection.send(Refused(event.sequence, event.message, bad_request=False))


def _last_word(error: Exception) -> Broken:
    return Broken(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _obey(message: Submit | Cancel, loop: Loop, connection: Connection) -> None:
    if isinstance(message, Cancel):
        loop.cancel(message.number)
        return
    try:
        loop.submit(message.number, message.prompt, message.params)
    except EngineError as error:
        connection.send(Refused(message.number, str(error), bad_request=True))
