"""The chat command: on a model that writes what it is told, for every way a turn can go; and on the nano checkpoint."""
import io
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from gptoss_lab.cli import loading, main, turn
from gptoss_lab.cli.speed import Speed
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, Event, SamplingParams
from gptoss_lab.harmony import encode, render, system, user

FINAL = "<|channel|>final<|message|>"
DATE = "2025-06-28"


class Scripted:
    """A model that writes given texts, a text a turn, whatever it is asked; it keeps the prompts it was given."""

    config, device = preset("nano"), torch.device("cpu")

    def __init__(self, *texts):
        self.scripts = [encode(text, special=True) for text in texts]
        self.prompts = []

    def new_cache(self, capacity):
        return SimpleNamespace(length=0)

    def __call__(self, token_ids, lengths, caches, *, logits):
        (cache,) = caches
        if cache.length == 0:
            self.prompts.append(token_ids.tolist())
            self._left = iter(self.scripts[len(self.prompts) - 1])
        cache.length += len(token_ids)
        row = torch.zeros(1, self.config.vocab_size)
        row[0, next(self._left)] = 50.0
        return row


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(texts, *arguments, lines=()) -> (exit code, stdout, stderr, model) of `gptoss-lab chat`."""
    def run(texts, *arguments, lines=(), random=False):
        model = Scripted(*texts)
        monkeypatch.setattr(loading, "load", lambda *_, **__: Engine(model))
        monkeypatch.setattr(loading, "choose_checkpoint", lambda _: ("scripted", random))
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", "--date", DATE, "--temperature", "0", *map(str, arguments)])
        return code, *capsys.readouterr(), model
    return run


def test_once_prints_the_final_answer_alone(talk):
    text = f"<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant{FINAL}2 + 2 = 4<|return|>"
    code, out, err, model = talk([text], "--once", "What is 2 + 2?", "--reasoning", "low")
    assert (code, out, err) == (0, "2 + 2 = 4\n", "")
    assert model.prompts == [render([system("low", DATE), user("What is 2 + 2?")])]
    assert len(model.prompts[0]) == 75 and model.prompts[0][-2:] == [200006, 173781]  # the published golden vector


def test_analysis_is_shown_on_stderr_when_asked_for(talk):
    text = f"<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant{FINAL}4<|return|>"
    code, out, err, _ = talk([text], "--once", "x", "--show-analysis")
    assert (code, out, err) == (0, "4\n", "[analysis] Simple sum.\n")


def test_a_character_of_several_tokens_is_printed_whole(talk):
    _, out, _, _ = talk([f"{FINAL}a 𝒳 b<|return|>"], "--once", "x")
    assert out == "a 𝒳 b\n"


def test_conversation_keeps_answers_and_drops_old_analysis(talk):
    first = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL}One<|return|>"
    texts = [first, f"{FINAL}Two<|return|>"]
    code, out, err, model = talk(texts, "--instructions", "Be brief.", lines=["a", "", " b "])
    assert (code, out, err) == (0, "One\nTwo\n", "")
    second = model.prompts[1]
    assert encode("One") == second[second.index(17196) + 2 :][:1]           # ...final<|message|>One
    assert 35644 not in second[second.index(173781) :], "the analysis of the first turn is still there"
    assert second[:10] == model.prompts[0][:10] and any(token == encode(" brief")[0] for token in second)


def test_a_tool_call_is_shown_where_there_is_no_answer(talk):
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
    code, out, err, _ = talk([text], "--once", "x")
    assert code == 0 and out == '[commentary to functions.f] {"a":1}\n'
    assert re.fullmatch(r"no text in the channel final after \d+ tokens; this is what the model wrote\n", err)


@pytest.mark.parametrize(("text", "shown"), [
    ("<|channel|>analysis<|message|>Only thinking.<|return|>", "[analysis] Only thinking.\n"),
    ("I cannot do it.<|return|>", "[no channel] I cannot do it.\n"),
])
def test_a_turn_without_an_answer_is_shown_and_said(talk, text, shown):
    code, out, err, _ = talk([text], "--once", "x")
    assert code == 0 and out == shown and "no text in the channel final" in err and err.count("\n") == 1


def test_noise_is_streamed_as_it_comes(talk):
    noise = "lorem ipsum dolor sit amet " * 12
    code, out, err, _ = talk([noise], "--once", "x", "--max-tokens", 50)
    ids = encode(noise)[:50]
    assert code == 0 and encode(out.rstrip("\n")) == ids
    assert err.splitlines() == [
        "no message has begun after 32 tokens; this is the text as it comes",
        "the model had not ended: --max-tokens is reached",
    ]


def test_a_cut_answer_says_so_and_the_next_turn_works(talk):
    texts = [f"{FINAL}one two three four", f"{FINAL}ok<|return|>"]
    code, out, err, model = talk(texts, "--max-tokens", 5, lines=["a", "b"])
    assert code == 0 and out == "one two\nok\n"
    assert err == "the model had not ended: --max-tokens is reached\n"
    assert encode("one")[0] in model.prompts[1]


def test_after_a_turn_that_is_not_harmony_the_conversation_goes_on(talk):
    code, out, _, model = talk(["no header at all<|return|>", f"{FINAL}ok<|return|>"], lines=["a", "b"])
    assert code == 0 and out.endswith("ok\n") and len(model.prompts) == 2


def test_random_weights_are_announced_once(talk):
    text = f"{FINAL}x<|return|>"
    _, _, err, _ = talk([text, text], lines=["a", "b"], random=True)
    assert err == "the weights are random: the answer is noise, only the machinery is real\n"


def test_tokens_are_printed_when_they_come_not_at_the_end(talk, monkeypatch):
    shown = []
    monkeypatch.setattr(turn, "_write", shown.append)
    talk([f"{FINAL}one two three<|return|>"], "--once", "x")
    assert shown == ["one", " two", " three"]


def test_a_terminal_gets_no_control_characters(talk, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    _, piped, _, _ = talk([f"{FINAL}a\x1b[2Jb<|return|>"], "--once", "x")
    assert piped == "a\x1b[2Jb\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    talk([f"{FINAL}a\x1b[2Jb\tc<|return|>"], "--once", "x")
    assert terminal.getvalue() == "a\ufffd[2Jb\tc\n"


def test_speed_counts_prefill_apart(monkeypatch):
    clock = iter([0.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr("gptoss_lab.cli.speed.time.perf_counter", lambda: next(clock))
    speed = Speed(7)
    list(speed.watch([Event(0, 1), Event(1, 1), Event(0, 2), Event(1, 2)]))
    assert (speed.prefill, speed.decoded, speed.decode, speed.tokens_per_second) == (3.0, 2, 2.0, 1.0)
    assert speed.line() == "7 prompt tokens in 3.000 s; then 2 tokens in 2.000 s, 1.0 tokens/s"


# -- the nano checkpoint -----------------------------------------------------------------------------------------------
def test_nano_chat_from_the_command_line():
    program = [sys.executable, "-c", "import sys; from gptoss_lab.cli import main; sys.exit(main())"]
    arguments = ["chat", "--once", "What is 2 + 2?", "--seed", "1", "--date", DATE, "--stats", "--max-tokens", "12"]
    environment = {k: v for k, v in os.environ.items() if k != "GPTOSS_LAB_CHECKPOINT"} | {"OMP_NUM_THREADS": "1"}
    command = program + arguments
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""
    lines = runs[0].stderr.splitlines()
    assert any("the weights are random" in line for line in lines) == loading.choose_checkpoint(None)[1]
    speed = re.fullmatch(r"75 prompt tokens in [\d.]+ s; then (\d+) tokens in [\d.]+ s, ([\d.]+) tokens/s", lines[-1])
    assert speed and 1 <= int(speed[1]) <= 11 and float(speed[2]) > 0


def test_nano_streams_twenty_tokens_a_second():
    """In CPU time of one core, so that a busy machine does not decide: at most 50 ms a token, best of four rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine = loading.load(loading.choose_checkpoint(None)[0], "cpu", "auto")
        prompt = render([system("low", DATE), user("What is 2 + 2?")])
        stream = engine.generate([prompt], SamplingParams(seed=1, max_new_tokens=41, stop_ids=()))
        next(stream)
        rounds = []
        for _ in range(4):
            start = time.process_time()
            for _ in range(10):
                next(stream)
            rounds.append((time.process_time() - start) / 10)
    finally:
        torch.set_num_threads(threads)
    assert min(rounds) < 0.050
