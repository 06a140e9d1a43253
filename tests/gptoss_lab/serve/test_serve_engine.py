"""The engine in its own process, and the limits: what happens when things die, stall, crowd or leave."""
import asyncio
import functools
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import psutil
import pytest
from serve_live import serving
from serve_script import BAD_LOGITS, BODY, CRASH, no_loop, scripted, watched_loop

from gptoss_lab.harmony import encode
from gptoss_lab.serve import EngineProcess, EngineStartError, Settings, SettingsError

LONG = [*BODY, *encode("word") * 100_000]
SCRIPT = {
    "long": LONG,
    "crash": [*BODY, *encode("so far so"), CRASH],
    "crash at once": [CRASH],
    "bad logits": [*BODY, *encode("so far so"), BAD_LOGITS],
    "short": [*BODY, *encode("short"), 200002],
}


def user(text):
    return [{"role": "user", "content": text}]


def ask(live, text, **options):
    return live.client.chat.completions.create(model="nano", messages=user(text), **options)


def get(url, headers=None):
    """Status, headers and body of a GET, errors too."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def metric(live, name):
    """The value of a sample of /metrics, 0 for what has not happened."""
    lines = get(live.url + "/metrics")[2].splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), 0)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """A server whose engine takes 5 ms a step, runs 2 at once and says in a file what it runs."""
    path = tmp_path_factory.mktemp("slow") / "batch"
    build = functools.partial(watched_loop, str(path), SCRIPT, 0.005)
    with serving(build, max_running=2, max_queue=1, default_tokens=90_000) as live:
        live.batch = lambda: json.loads(path.read_text()) if path.exists() else []
        live.moves = lambda: path.stat().st_mtime_ns
        live.forget = lambda: path.unlink(missing_ok=True)
        yield live


@pytest.fixture
def slow(slow_server):
    """The same, at rest, with nothing in its file."""
    slow_server.wait(lambda: slow_server.server.open == 0)
    time.sleep(0.1)
    slow_server.forget()
    return slow_server


def test_a_client_that_leaves_its_stream_is_cancelled_in_the_engine(slow):
    before = metric(slow, 'gptoss_answers_total{reason="broken off"}')
    stream = ask(slow, "long", stream=True)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert slow.server.open == len(slow.batch()) == 1
    stream.close()
    slow.wait(lambda: slow.server.open == 0)
    _assert_at_rest(slow)
    assert ask(slow, "short").choices[0].message.content == "short"
    assert metric(slow, 'gptoss_answers_total{reason="broken off"}') == before + 1


def test_a_client_that_leaves_before_its_whole_answer_is_cancelled_in_the_engine(slow):
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        body = json.dumps({"model": "nano", "messages": user("long")}).encode()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        slow.wait(lambda: len(slow.batch()) == 1)
    slow.wait(lambda: slow.server.open == 0)
    _assert_at_rest(slow)


def _assert_at_rest(live):
    """The engine makes no more steps."""
    until = time.monotonic() + 10
    while True:
        before = live.moves()
        time.sleep(0.3)
        if live.moves() == before:
            return
        assert time.monotonic() < until, "the engine still runs what nobody reads"


def test_requests_beyond_rows_and_queue_are_turned_away_and_a_place_becomes_free(slow):
    streams = [ask(slow, "long", stream=True) for _ in range(3)]
    next(streams[0])
    with pytest.raises(openai.RateLimitError, match="3 requests are being answered or waiting, the limit is 3") as full:
        ask(slow, "short")
    assert full.value.response.headers["retry-after"] == "1" and full.value.code == "overloaded"
    slow.wait(lambda: len(slow.batch()) == 2)  # the third waits for a row
    for stream in streams[:2]:
        stream.close()
    slow.wait(lambda: slow.server.open == 1)
    assert ask(slow, "short").choices[0].message.content == "short"
    streams[2].close()


def test_an_answer_that_takes_too_long_ends_with_an_error_and_frees_the_engine(tmp_path):
    path = tmp_path / "batch"
    build = functools.partial(watched_loop, str(path), SCRIPT, 0.005)
    with serving(build, request_timeout=0.5) as live:
        live.moves = lambda: path.stat().st_mtime_ns
        with pytest.raises(openai.InternalServerError, match="was not finished within 0.5 seconds") as caught:
            ask(live, "long")
        assert caught.value.status_code == 504 and caught.value.code == "timeout"
        with pytest.raises(openai.APIError, match="was not finished within 0.5 seconds"):
            for _ in ask(live, "long", stream=True):
                pass
        live.wait(lambda: live.server.open == 0)
        _assert_at_rest(live)


def test_a_client_that_does_not_read_holds_up_nobody_and_is_left(tmp_path):
    """It asks for a long answer and never reads; others stream at full speed; after send_timeout it is dropped."""
    with serving(scripted(SCRIPT), send_timeout=1.0, default_tokens=120_000) as live, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", live.port))
        body = json.dumps({"model": "nano", "messages": user("long"), "stream": True}).encode()
        lazy.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        live.wait(lambda: live.server.open == 1)
        began = time.monotonic()
        for _ in range(5):
            assert ask(live, "short").choices[0].message.content == "short"
        assert time.monotonic() - began < 10
        live.wait(lambda: live.server.open == 0, 90)
        assert metric(live, 'gptoss_answers_total{reason="broken off"}') == 1


def test_the_engines_death_is_told_to_everybody_and_the_next_one_answers():
    """While there is no engine requests are refused, and health says so."""
    with serving(scripted(SCRIPT, seconds=0.01)) as live:
        assert get(live.url + "/health")[0] == 200 and metric(live, "gptoss_engine_up") == 1
        first = live.server.engine.pid
        other = ask(live, "long", stream=True)
        next(other)
        text = ""
        with pytest.raises(openai.APIError, match="the engine's process ended with exit code 7") as caught:
            for chunk in ask(live, "crash", stream=True):
                text += chunk.choices[0].delta.content or ""
        assert text == "so far so" and caught.value.code == "engine_unavailable"
        with pytest.raises(openai.APIError, match="it is being started again"):
            for _ in other:
                pass
        assert live.server.engine.state == "starting"
        with pytest.raises(openai.InternalServerError) as caught:
            ask(live, "short")
        assert caught.value.status_code == 503 and caught.value.code == "engine_unavailable"
        status, _, body = get(live.url + "/health")
        assert status == 503 and json.loads(body)["status"] == "starting"
        live.wait(lambda: live.server.engine.state == "ready" and live.server.engine.pid not in (None, first))
        assert ask(live, "short").choices[0].message.content == "short"
        assert live.server.engine.deaths == metric(live, "gptoss_engine_deaths") == 1
        assert live.server.open == 0


def test_an_engine_that_dies_again_and_again_is_given_up():
    """The first time it is killed from outside."""
    with serving(scripted(SCRIPT), restarts=1) as live:
        os.kill(live.server.engine.pid, signal.SIGKILL)
        live.wait(lambda: live.server.engine.state == "starting")
        live.wait(lambda: live.server.engine.state == "ready")
        with pytest.raises(openai.InternalServerError, match="ended with exit code 7"):
            ask(live, "crash at once")
        live.wait(lambda: live.server.engine.state == "down")
        assert get(live.url + "/health")[0] == 503 and live.server.engine.pid is None
        with pytest.raises(openai.InternalServerError, match="ended with exit code 7"):
            ask(live, "short")


def test_an_engine_that_cannot_start_says_why():
    async def start():
        engine = EngineProcess(functools.partial(no_loop, "no such\nfolder"))
        with pytest.raises(EngineStartError, match="ended with exit code 1: ValueError: no such folder, no HTTP"):
            await engine.start()
        assert engine.state == "stopped"

    asyncio.run(start())


def test_a_key_is_asked_for_everywhere_but_health():
    with serving(scripted(SCRIPT), api_key="s3cret") as live:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            for wrong in (None, "Bearer wrong", "Bearer", "s3cret", "Basic s3cret", "Bearer s3cret2", "Bearer \xe9"):
                status, headers, body = get(live.url + path, {"Authorization": wrong} if wrong else None)
                assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"
        assert get(live.url + "/health")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            ask(live, "short")
        with live.client.with_options(api_key="s3cret") as client:
            answer = client.chat.completions.create(model="nano", messages=user("short"))
        assert answer.choices[0].message.content == "short"
        assert "s3cret" not in repr(live.server.settings)


def _raw(live, head, *chunks):
    """Send bytes as they are and return all that comes back."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head)
        for chunk in chunks:
            connection.sendall(chunk)
        received = b""
        while piece := connection.recv(65536):
            received += piece
            if b"\r\n\r\n" in received and b"}" in received:
                return received


def test_bodies_that_are_too_long_or_too_slow_are_given_up():
    with serving(scripted(SCRIPT), max_body=1000, body_timeout=0.5) as live:
        with pytest.raises(openai.APIStatusError, match="the request is longer than 1000 bytes") as caught:
            ask(live, "x" * 2000)
        assert caught.value.status_code == 413 and caught.value.code == "request_too_large"
        head = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\n")
        parts = b"3e8\r\n" + b" " * 1000 + b"\r\n", b"1\r\nx\r\n"
        chunked = _raw(live, head + b"Transfer-Encoding: chunked\r\n\r\n", *parts)
        assert chunked.startswith(b"HTTP/1.1 413") and b"request_too_large" in chunked
        late = _raw(live, head + b"Content-Length: 100\r\n\r\n", b"{")
        assert late.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 seconds" in late
        assert ask(live, "short").choices[0].message.content == "short"


NUMBERS = {f"number {i}": [*BODY, *encode(f"answer {i} " * (i % 7 + 1)), 200002] for i in range(40)}


@pytest.fixture(scope="module")
def live():
    """A server for tests that leave nothing behind; its engine takes 10 ms a step, and ends with it."""
    with serving(scripted(SCRIPT | NUMBERS, seconds=0.01)) as running:
        process = psutil.Process(running.server.engine.pid)
        yield running
        assert process.is_running()
    process.wait(10)


def test_metrics_count_what_happened(live):
    samples = ("gptoss_prompt_tokens_total", "gptoss_generated_tokens_total", "gptoss_first_token_seconds_count",
               'gptoss_http_requests_total{path="/v1/chat/completions",status="200"}',
               'gptoss_http_requests_total{path="/v1/chat/completions",status="404"}',
               'gptoss_http_requests_total{path="other",status="404"}', 'gptoss_answers_total{reason="stop"}')
    before = [metric(live, name) for name in samples]
    used = ask(live, "short").usage
    with pytest.raises(openai.NotFoundError):
        live.client.chat.completions.create(model="x", messages=user("short"))
    get(live.url + "/made-up/1")
    counted = [metric(live, name) - old for name, old in zip(samples, before, strict=True)]
    assert counted == [used.prompt_tokens, used.completion_tokens, 1, 1, 1, 1, 1]
    assert metric(live, "gptoss_open_answers") == 0


def test_bad_logits_end_one_request_and_no_other(live):
    deaths = live.server.engine.deaths
    other = ask(live, "long", stream=True, max_tokens=60)
    next(other)
    with pytest.raises(openai.InternalServerError, match="the logits are nan") as caught:
        ask(live, "bad logits")
    assert caught.value.status_code == 500 and caught.value.code == "engine_error"
    assert "".join(c.choices[0].delta.content or "" for c in other) == "word" * 57
    assert live.server.engine.deaths == deaths


def test_requests_at_the_same_time_get_their_own_answers(live):
    """40 threads with the plain client, whole answers."""
    got = {}

    def one(i):
        got[i] = ask(live, f"number {i}").choices[0].message.content

    threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: f"answer {i} " * (i % 7 + 1) for i in range(40)}


@pytest.mark.parametrize(("change", "message"), [
    ({"model": ""}, "model is ''"), ({"max_context": 0}, "max_context is 0; at least 1"),
    ({"max_queue": -1}, "max_queue is -1; at least 0"), ({"request_timeout": 0}, "request_timeout is 0"),
    ({"send_timeout": float("inf")}, "send_timeout is inf"), ({"api_key": ""}, "api_key is ''"),
    ({"date": "tomorrow"}, "date is 'tomorrow'; write it as YYYY-MM-DD"),
])
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**{"model": "nano", **change})
