"""Load on a server on loopback: many streaming clients for a while, every token checked, CPU time of the front end.

    python -m gptoss_lab.serve.load --clients 64 --seconds 60

The server runs in a process of its own with an engine that echoes (echo.py), the clients are the official ones. CPU
time is user and system time of the front end's process alone, without the engine's, from psutil, divided by the tokens
that the clients were told of. Rows of the suite "serve" go to a file when --out names one.
"""
from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil
import uvicorn

from gptoss_lab.harmony import decode
from gptoss_lab.results import make_row, write_rows
from gptoss_lab.serve.app import create_app
from gptoss_lab.serve.echo import echo_loop, expected
from gptoss_lab.serve.settings import Settings

WORDS = ("river", "Ω", "stone", "naïve", "𝒳", "seven", "雪", "lamp", "🙂", "of", "quartz", "and", "Zürich", "blue")


@dataclass
class Tally:
    """What the clients saw. wrong: answers whose text or count is not the expected one, with what is wrong."""

    answers: int = 0
    tokens: int = 0
    chunks: int = 0
    first_chunk: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run_server(listening: socket.socket, interval: float, clients: int) -> None:
    """In a process of its own: serve the echo on a socket that listens already."""
    settings = Settings(model="echo", max_running=clients, max_queue=clients, date="2025-06-28")
    app = create_app(settings, functools.partial(echo_loop, interval, clients))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


async def client(api: openai.AsyncOpenAI, number: int, until: float, tokens: int, tally: Tally) -> None:
    """Ask again and again until the time is over, each time something else, and check every answer."""
    draw = random.Random(number)
    while time.monotonic() < until:
        text = f"client {number}: " + " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))
        wanted = draw.randint(tokens // 2, tokens)
        began, last, got, usage = time.monotonic(), None, [], None
        stream = await api.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": text}], stream=True, max_completion_tokens=wanted,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            now = time.monotonic()
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                got.append(chunk.choices[0].delta.content)
                tally.chunks += 1
                if last is None:
                    tally.first_chunk.append(now - began)
                else:
                    tally.gaps.append(now - last)
                last = now
        _check(tally, number, text, wanted, "".join(got), usage)


def _check(tally: Tally, number: int, text: str, wanted: int, got: str, usage: Any) -> None:
    tally.answers += 1
    if usage is None or usage.completion_tokens != wanted:
        tally.wrong.append(f"client {number}: {usage} instead of {wanted} tokens")
        return
    tally.tokens += wanted
    if got != decode(expected(text, wanted)):
        tally.wrong.append(f"client {number}: {got[:80]!r} is not the answer to {text[:80]!r}")


async def measure(url: str, process: psutil.Process, clients: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Run the clients. Returns the tally, seconds of CPU of the front end, and seconds that went by."""
    tally = Tally()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:
        await client(api, 0, time.monotonic() + 0.01, 20, Tally())  # the first request imports and loads
        before, began = process.cpu_times(), time.monotonic()
        await asyncio.gather(*(client(api, n, began + seconds, tokens, tally) for n in range(1, clients + 1)))
        after, wall = process.cpu_times(), time.monotonic() - began
    return {"tally": tally, "cpu": after.user - before.user + after.system - before.system, "wall": wall}


def load(clients: int = 64, seconds: float = 60.0, interval: float = 0.05, tokens: int = 256) -> dict[str, Any]:
    """Start a server on loopback, load it, and end it. tokens: at most so many in an answer."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=(listening, interval, clients))
    process.start()
    port = listening.getsockname()[1]
    listening.close()
    try:
        url = f"http://127.0.0.1:{port}/v1"
        return asyncio.run(measure(url, psutil.Process(process.pid), clients, seconds, tokens))
    finally:
        process.terminate()
        process.join(20)


def rows(result: dict[str, Any], clients: int, interval: float) -> list[dict[str, Any]]:
    """Rows of the suite "serve": CPU time of the front end for a token, throughput, times to and between chunks."""
    tally, case = result["tally"], f"{clients} streams of an echo"
    common = {
        "batch": clients, "generated_tokens": tally.tokens, "answers": tally.answers, "wrong_answers": len(tally.wrong),
        "chunks": tally.chunks, "interval_seconds": interval, "wall_seconds": round(result["wall"], 2),
        "cores": os.cpu_count(), "load_average": [round(x, 2) for x in os.getloadavg()],
        "what": "CPU time of the front end's process (user and system), the engine's process not counted",
    }
    cpu = [1e6 * result["cpu"] / tally.tokens]
    made = [
        make_row("serve", f"{case}, front end CPU per token", "fastapi", "microseconds", cpu, "us", statistic="single",
                 **common),
        make_row("serve", case, "fastapi", "tokens_per_second", [tally.tokens / result["wall"]], "tokens/s",
                 statistic="single", **common),
    ]
    for name, values in (("time to first chunk", tally.first_chunk), ("time between chunks", tally.gaps)):
        some = sorted(values)
        marks = [some[int(q * (len(some) - 1))] for q in (0.5, 0.95, 0.99, 1.0)]
        made.append(make_row("serve", f"{case}, {name}", "fastapi", "seconds", marks[:1], "s", statistic="single",
                             p95=marks[1], p99=marks[2], largest=marks[3], **common))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 when a token was lost or mixed."""
    parser = argparse.ArgumentParser(description="Load a server on loopback and check every token.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between two tokens of a stream")
    parser.add_argument("--out", help="a .jsonl file that the rows are added to")
    given = parser.parse_args(arguments)
    if not (1 <= given.clients <= 512 and 0 < given.seconds <= 600 and given.interval >= 0):
        parser.error("clients 1 to 512, seconds up to 600 and an interval of at least 0 are expected")
    result = load(given.clients, given.seconds, given.interval)
    tally, made = result["tally"], rows(result, given.clients, given.interval)
    for row in made:
        print(f"{row['case']}: {row['value']:.6g} {row['unit']}")
    print(f"{tally.answers} answers, {tally.tokens} tokens, {len(tally.wrong)} wrong; load {os.getloadavg()[0]:.1f}")
    for line in tally.wrong[:10]:
        print(line)
    if given.out:
        write_rows(given.out, made)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
