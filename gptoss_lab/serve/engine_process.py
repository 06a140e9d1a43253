"""The front end's handle on the engine's process: start it, send it requests, hand out its tokens, survive its death.

The process is spawned, so it shares no state, no lock and no GPU context with the front end; only ids and
log-probabilities cross. Two threads do what could block: one reads the pipe, one writes it (a long prompt fills it
while the engine is in a step). When the process dies, every open request ends with an error that says so, and a new one
is started, after a pause that doubles; `restarts` deaths in a row without a single token between them are final.
"""
from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from gptoss_lab.engine import Loop, SamplingParams
from gptoss_lab.serve import worker
from gptoss_lab.serve.errors import bad_request, engine_down, engine_failed
from gptoss_lab.serve.stream import Stream
from gptoss_lab.serve.wire import Broken, Cancel, Ready, Refused, Stop, Submit, Tokens

STARTING, READY, DOWN, STOPPED = "starting", "ready", "down", "stopped"
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0


class EngineStartError(RuntimeError):
    """The engine's process ended before it was ready."""


class EngineProcess:
    """One engine in a process of its own; all methods are called in one event loop.

    build: makes the loop, in the other process: a function that can be pickled, or a partial of one. restarts: see
    above. state: "starting", "ready", "down" or "stopped"; reason: why, in one line. deaths: how often it died.
    """

    def __init__(self, build: Callable[[], Loop], restarts: int = 3) -> None:
        self.state, self.reason = STOPPED, "the engine has not been started"
        self.info: Ready | None = None
        self.deaths = 0
        self._last_word = ""
        self._build, self._restarts, self._in_a_row = build, restarts, 0
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self._process: BaseProcess | None = None
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None when there is none."""
        return self._process.pid if self._process is not None and self._process.is_alive() else None

    async def start(self) -> Ready:
        """Start the process and wait until it takes requests. EngineStartError with its last word when it does not."""
        self._spawn()
        while self.state == STARTING:
            self._changed.clear()
            await self._changed.wait()
        if self.state != READY:
            reason = self.reason
            await self.stop()
            raise EngineStartError(reason)
        return self.info

    async def stop(self) -> None:
        """End the process; whoever still waits gets an error."""
        self.state, self.reason = STOPPED, "the server is stopping"
        if self._restarting is not None:
            self._restarting.cancel()
        self._fail_all()
        if self._process is not None:
            self._outbox.put(Stop())
            await asyncio.to_thread(_end, self._process)
            self._outbox.put(None)

    def submit(self, prompt: list[int], params: SamplingParams) -> Stream:
        """Send a request to the engine. ApiError 503 when there is none."""
        if self.state != READY:
            raise engine_down(self.reason)
        stream = Stream(next(self._numbers))
        self._streams[stream.number] = stream
        self._outbox.put(Submit(stream.number, prompt, params))
        return stream

    def release(self, stream: Stream) -> None:
        """Nobody reads this stream any more; the engine drops the request unless it has ended."""
        if self._streams.pop(stream.number, None) is not None and not stream.ended:
            self._outbox.put(Cancel(stream.number))

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.state, self.reason, self._last_word = STARTING, "the engine is starting", ""
        self._outbox = queue.SimpleQueue()
        self._process = context.Process(target=worker.main, args=(theirs, self._build), daemon=True, name="engine")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        loop, process = asyncio.get_running_loop(), self._process
        for target, arguments in ((self._read, (ours, loop, process)), (_write, (ours, self._outbox))):
            threading.Thread(target=target, args=arguments, daemon=True).start()

    def _read(self, connection: Connection, loop: asyncio.AbstractEventLoop, process: BaseProcess) -> None:
        """In a thread: hand every message to the event loop, and say when the pipe has ended."""
        try:
            while True:
                loop.call_soon_threadsafe(self._handle, connection.recv())
        except (EOFError, OSError):
            _end(process, patience=20)                   # it ends by itself, and its exit code shall be its own
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._died, process)
        except RuntimeError:
            return  # the event loop is closed: the server has gone
        finally:
            connection.close()

    def _handle(self, message: Ready | Tokens | Refused | Broken) -> None:
        if isinstance(message, Tokens):
            self._in_a_row = 0
            for token in message.found:
                stream = self._streams.get(token.number)
                if stream is not None:
                    stream.put(token)
        elif isinstance(message, Refused):
            stream = self._streams.get(message.number)
            if stream is not None:
                stream.fail(bad_request(message.message) if message.bad_request else engine_failed(message.message))
        elif isinstance(message, Ready):
            self.state, self.reason, self.info = READY, "", message
            self._changed.set()
        else:
            self._last_word = f": {message.message}"

    def _died(self, process: BaseProcess) -> None:
        """The process has ended. Unless that was wanted, tell everybody and start another."""
        self._outbox.put(None)
        if process is not self._process or self.state == STOPPED:
            return
        self.deaths += 1
        self._in_a_row += 1
        self.reason = f"the engine's process ended with exit code {process.exitcode}{self._last_word}"
        if self.info is None or self._in_a_row > self._restarts:
            self.state = DOWN
        else:
            self.state, self.reason = STARTING, self.reason + "; it is being started again"
            self._restarting = asyncio.ensure_future(self._restart())
        self._fail_all()
        self._changed.set()

    async def _restart(self) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._in_a_row - 1)))
        try:
            self._spawn()
        except OSError as error:
            self.state, self.reason = DOWN, f"the engine's process cannot be started: {error.strerror}"

    def _fail_all(self) -> None:
        for stream in self._streams.values():
            if not stream.ended:
                stream.fail(engine_down(self.reason))
        self._streams.clear()


def _write(connection: Connection, outbox: queue.SimpleQueue[object]) -> None:
    """In a thread: send what is put into the outbox; None ends it, and so does a pipe that nobody reads."""
    while (message := outbox.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return


def _end(process: BaseProcess, patience: float = 2) -> None:
    """Wait `patience` seconds for the process; one that is in a long step, or stuck, is then made to end."""
    process.join(patience)
    for force in (process.terminate, process.kill):
        if process.is_alive():
            force()
            process.join(2)
