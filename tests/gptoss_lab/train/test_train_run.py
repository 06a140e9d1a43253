"""The whole way, small: train, quantise, heads, draft, evaluate, write, expand, open, serve, card; then resume."""
import json
from dataclasses import replace

import pytest

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.compact import expand
from gptoss_lab.train import run as run_module
from gptoss_lab.train.run import main, prepare, train_and_write
from gptoss_lab.train.settings import REHEARSAL, SMOKE, Settings

FILES = {"nano.safetensors", "draft.safetensors", "mtp.safetensors", "evaluation.json", "README.md", "train.jsonl"}
SHORT = replace(SMOKE, tokens=1_024, steps=(16, 2, 2), log_every=4, evaluation=4, answer_tokens=12,
                vocabulary_sample=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    run = prepare(SHORT, out)
    return out, train_and_write(run, "python -m gptoss_lab.train.run --smoke")


def test_everything_is_there_and_the_loss_fell(finished):
    out, report = finished
    assert {p.name for p in out.iterdir()} == FILES
    losses = [row["loss"] for row in map(json.loads, (out / "train.jsonl").read_text().splitlines())
              if row.get("phase") == "model"]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert json.loads((out / "evaluation.json").read_text()) == json.loads(json.dumps(report))
    assert report["served"]["hf"]["share"] == report["served"]["original"]["share"] == 1.0
    assert report["training"]["steps"] == 16 and report["exact_match"]["all"]["count"] == 4
    assert 0 <= report["draft_agreement"] <= 1 and report["held_out"]["perplexity"] > 1


def test_the_models_open(finished, tmp_path):
    out, _ = finished
    for name, config in (("nano", SHORT.model), ("draft", SHORT.draft)):
        opened = open_checkpoint(expand(out / f"{name}.safetensors", tmp_path / name))
        assert opened.config == config and opened.config.vocab_size == 201_088


def test_the_card_has_every_number(finished):
    out, report = finished
    card = (out / "README.md").read_text()
    assert "{" not in card and f"{report['held_out']['perplexity']:.4f}" in card
    assert "python -m gptoss_lab.train.run --smoke" in card and "| all | " in card


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    out, report = finished
    monkeypatch.setattr(run_module, "run_phase", lambda *a, **k: pytest.fail("a phase was trained again"))
    before = (out / "nano.safetensors").read_bytes()
    again = train_and_write(prepare(SHORT, out), "again")
    assert (out / "nano.safetensors").read_bytes() == before and again["held_out"] == report["held_out"]


def test_a_state_of_another_run_is_refused(finished):
    out, _ = finished
    with pytest.raises(SystemExit, match="is of another run"):
        train_and_write(prepare(SHORT, out, seed=1), "other")


def test_what_is_trained_is_written_before_anything_is_measured(tmp_path, monkeypatch):
    def measure(run, *models):
        assert {p.name for p in run.out.iterdir()} == FILES - {"evaluation.json", "README.md"}
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        train_and_write(prepare(replace(SHORT, steps=(2, 1, 1)), tmp_path / "out"), "x")


def test_problems_are_answered_until_the_time_is_up(finished, monkeypatch):
    from gptoss_lab.train.evaluate import held_out_set

    out, _ = finished
    run = prepare(replace(SHORT, far=1), out)
    monkeypatch.setattr(run_module, "AT_A_TIME", 2)
    monkeypatch.setattr(run_module, "writer", lambda *a: lambda prompts: [[200_002] for _ in prompts])
    problems = held_out_set(5)
    assert not run.out_of_time and len(run_module.answered(run, None, problems)) == 6
    late = replace(run, settings=replace(run.settings, steps=None), began=run.began - 60 * run.minutes)
    assert late.out_of_time and len(run_module.answered(late, None, problems)) == 2
    assert late.log.rows[-1] == {"event": "out of time", "answered": 2, "of": 5}


def test_a_rehearsal_says_what_the_whole_run_would_do(finished):
    out, _ = finished
    run = prepare(SHORT, out, minutes=8.0)
    for speed in (100.0, 1_000.0, 900.0):
        run.log(phase="model", loss=1.0, tokens_per_second=speed)
    told = run_module.forecast(run)
    start = run.log.rows[0]["seconds"]
    assert told["model_seconds"] == pytest.approx(0.8 * (8 * 60 - 60 - start))
    assert told["tokens"] == pytest.approx(900 * told["model_seconds"])
    assert told["steps"] == pytest.approx(told["tokens"] / SHORT.tokens)
    assert REHEARSAL.model == Settings().model and REHEARSAL.tokens == Settings().tokens


def test_a_gpu_without_quick_attention_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "choose_form", lambda *a: ("reference", "flash refused: x; flex refused: y"))
    with pytest.raises(SystemExit, match="no quick attention with gradients here: flash refused: x"):
        prepare(SHORT, tmp_path, device="cuda")


def test_too_little_time_is_refused(tmp_path):
    short = replace(Settings(), model=SMOKE.model, draft=SMOKE.draft, vocabulary_sample=100)
    with pytest.raises(SystemExit, match="nothing is left for training"):
        train_and_write(prepare(short, tmp_path / "x", minutes=0.1), "x")


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "train_and_write", lambda run, command: print(run.settings == SMOKE, command))
    assert main(["--out", str(tmp_path / "o"), "--smoke", "--device", "cpu"]) == 0
    assert "True python -m gptoss_lab.train.run --out" in capsys.readouterr().out
    monkeypatch.setattr(run_module, "train_and_write", lambda run, command: print(run.settings.tokens))
    assert main(["--out", str(tmp_path / "o"), "--smoke", "--device", "cpu", "--tokens", "640"]) == 0
    assert "640" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--smoke"])


def test_nothing_that_runs_a_model_imports_training():
    import subprocess
    import sys

    code = ("import sys, gptoss_lab.engine, gptoss_lab.model, gptoss_lab.checkpoint, gptoss_lab.harmony, "
            "gptoss_lab.serve, gptoss_lab.cli; assert not any(m.startswith('gptoss_lab.train') for m in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
