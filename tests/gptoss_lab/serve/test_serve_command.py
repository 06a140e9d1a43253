"""`gptoss-lab serve` as a user starts it: a process of its own, ended by a signal."""
import functools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.cli import main

COMMAND = [sys.executable, "-c", "from gptoss_lab.cli import main; raise SystemExit(main())", "serve"]


def start(*arguments, **environment):
    return subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def fails(*arguments, code=1, **environment):
    """The one line with which the command ends."""
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and out == "" and "Traceback" not in err, err
    return err


def test_it_serves_nano_until_it_is_interrupted():
    process = start("--port", "0", "--device", "cpu", "--checkpoint", str(ensure_nano()), "--context", "200",
                    "--model", "mine", GPTOSS_LAB_API_KEY="key")
    try:
        line = process.stderr.readline()
        url = re.fullmatch(r"mine at (http://127\.0\.0\.1:\d+/v1)\n", line).group(1)
        with openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=60) as client:
            ask = functools.partial(client.chat.completions.create, model="mine", logprobs=True, temperature=0,
                                    reasoning_effort="low", messages=[{"role": "user", "content": "What is 25 + 17?"}])
            answer, cut = ask(max_tokens=100), ask(max_tokens=3)
            assert answer.choices[0].finish_reason == "stop" and "42" in answer.choices[0].message.content
            tokens = answer.choices[0].logprobs.content
            assert "".join(token.token for token in tokens) == answer.choices[0].message.content
            assert all(-1 < token.logprob <= 0 for token in tokens)       # a sure token's may round to 0
            assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
        with urllib.request.urlopen(url.replace("/v1", "/health"), timeout=20) as health:
            assert json.load(health)["context"] == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert "Traceback" not in err and out == ""
        assert process.returncode in (0, 130)
    finally:
        process.kill()
        process.wait()


TINY = Path(__file__).parents[2] / "fixtures" / "tiny" / "hf"


@pytest.mark.parametrize(("arguments", "code", "line"), [
    (("--checkpoint", str(TINY.parent)), 1, "no config.json at"),
    (("--format", "nope", "--device", "cpu"), 1, "chat format 'nope' is unknown; use one of harmony, chatml"),
    (("--timeout", "0", "--device", "cpu"), 2, "request_timeout is 0.0"),
    (("--port", "0", "--checkpoint", str(TINY), "--device", "cpu"), 1,
     "chat format 'harmony' writes id 200012; the model has ids 0..319"),
    (("--host", "192.0.2.1", "--port", "1", "--device", "cpu"), 1, "cannot listen on 192.0.2.1 port 1"),
])
def test_what_keeps_it_from_starting_is_one_line(capsys, monkeypatch, arguments, code, line):
    """In this process, which has imported what each of these needs for seconds."""
    monkeypatch.setenv("GPTOSS_LAB_API_KEY", "x")
    assert main(["serve", *arguments]) == code
    out, err = capsys.readouterr()
    assert line in err and out == "" and (code == 2 or err.count("\n") == 1)


def test_a_vocabulary_that_is_not_there_is_named_with_its_setting(tmp_path):
    """Case P21: no network is asked; the error names the file and the setting."""
    line = fails("--port", "0", "--device", "cpu", TIKTOKEN_ENCODINGS_BASE=str(tmp_path))
    assert "o200k_base.tiktoken" in line and "TIKTOKEN_ENCODINGS_BASE" in line


def test_an_engine_that_cannot_load_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text((ensure_nano() / "config.json").read_text())
    line = fails("--port", "0", "--device", "cpu", "--checkpoint", str(tmp_path))
    assert "the engine's process ended with exit code 1" in line and "CheckpointError" in line


def test_the_help_names_options_and_where_it_listens():
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
    assert done.returncode == 0
    for word in ("--api-key", "--format", "--context", "this machine alone", "127.0.0.1"):
        assert word in done.stdout
