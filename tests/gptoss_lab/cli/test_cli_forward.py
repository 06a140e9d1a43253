"""`--forward`: the fast model on the CPU yields what the plain one does, and the choice is one line."""
import dataclasses

import pytest
from typer.testing import CliRunner

from gptoss_lab.checkpoint import ensure_nano, synth
from gptoss_lab.cli import main
from gptoss_lab.cli.main import app
from gptoss_lab.config import preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, eos_token_ids=(3,), pad_token_id=0)
    return synth(config, tmp_path_factory.mktemp("forward") / "model")


def generate(folder, *arguments, tokens=150):
    return CliRunner().invoke(app, ["generate", "1,2,3", "4", "--no-stop", "--temperature", "0", "--max-tokens",
                                    str(tokens), "--dtype", "float32", "--device", "cpu", "--checkpoint", str(folder),
                                    *arguments])


def test_the_fast_model_generates_the_plain_models_tokens(folder):
    silent, plain, fast = (generate(folder, *more) for more in ((), ("--forward", "plain"), ("--forward", "fast")))
    assert silent.exit_code == plain.exit_code == fast.exit_code == 0
    assert silent.stdout == plain.stdout == fast.stdout and len(fast.stdout.splitlines()) == 2
    assert silent.stderr == "" and plain.stderr == "plain model: as asked for\n"
    assert fast.stderr.startswith("fast model: as asked for; ") and len(fast.stderr.splitlines()) == 1


def test_nano_too():
    plain, fast = (generate(ensure_nano(), "--forward", forward, tokens=20) for forward in ("plain", "fast"))
    assert fast.exit_code == 0 and fast.stdout == plain.stdout


def test_a_draft_model_on_the_fast_forward(folder):
    drafted = generate(folder, "--forward", "fast", "--draft", str(folder), "--draft-tokens", "3", "--stats", tokens=17)
    assert drafted.stdout == generate(folder, tokens=17).stdout
    assert "24 of 24 proposals accepted, 4.00 tokens a round" in drafted.stderr


def test_chat_on_the_fast_forward(capsys):
    told = ["chat", "--once", "hi", "--seed", "1", "--max-tokens", "6", "--dtype", "float32", "--device", "cpu",
            "--date", "2025-06-28", "--checkpoint", str(ensure_nano()), "--show-analysis"]
    answers = []
    for forward in ("plain", "fast"):
        assert main([*told, "--forward", forward]) == 0
        out, err = capsys.readouterr()
        answers.append((out, err.splitlines()[1:]))
        assert err.splitlines()[0].startswith(f"{forward} model: as asked for")
    assert answers[0] == answers[1]


def test_wrong_words_and_pools_that_do_not_fit_are_one_line(folder, capsys, monkeypatch):
    told = ["generate", "1", "--device", "cpu", "--checkpoint", str(folder), "--forward"]
    assert main([*told, "quick"]) == 2
    assert "quick" in capsys.readouterr().err
    monkeypatch.setattr("gptoss_lab.engine.opening.CPU_BYTES", 10**6)
    assert main([*told, "fast", "--max-tokens", "1000000"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "keys and values of 1,000,001 tokens of 1 sequences do not fit" in err
