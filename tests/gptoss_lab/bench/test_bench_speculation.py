"""The bench of drafts, run small on the CPU: what is counted, timed, predicted and written, and what it refuses."""
import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from gptoss_lab.bench import speculation
from gptoss_lab.bench.fast_model import Subject
from gptoss_lab.bench.speculation_drafts import Drafts, load_pair, spoiled
from gptoss_lab.checkpoint import synth
from gptoss_lab.cli.main import app
from gptoss_lab.config import preset
from gptoss_lab.cost.speculation import StepSeconds, speedup, tokens_per_round
from gptoss_lab.model import load_model
from gptoss_lab.results import read_rows, validate

CPU = torch.device("cpu")
TINY = dataclasses.replace(preset("nano"), name="tiny", num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                           num_kv_heads=1, head_dim=32, sliding_window=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    synth(TINY, path)
    return path


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    g, path = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("heads") / "mtp.safetensors"
    shapes = {"expand": (96, 64), "project": (32, 96), "norm": (32,)}
    save_file({f"heads.{j}.{n}": torch.randn(shape, generator=g) / 8 for j in range(2) for n, shape in shapes.items()},
              path)
    return path


@pytest.mark.parametrize(("kind", "perfect"), [("self", True), ("noise", False), ("heads", False)])
def test_rows(folder, heads, tmp_path, kind, perfect, capsys):
    drafts = {"self": Drafts(checkpoint=folder), "noise": Drafts(noise=0.5), "heads": Drafts(heads=heads)}[kind]
    out, case = tmp_path / "rows.jsonl", speculation.Case(2, batch=2, new_tokens=9)
    (row,) = speculation.run(folder, drafts, out, [case], repetitions=2)
    assert read_rows(out) == [row] and row["suite"] == "speculation" and len(row["raw"]) == 2
    validate(row)
    of = row["conditions"]
    assert (of["model"], of["batch"], of["draft_tokens"], of["same_tokens"]) == ("tiny", 2, 2, 1.0)
    assert of["rounds"] > 0 and (of["acceptance"] == 1) == perfect
    assert of["acceptance"] == pytest.approx(sum(of["stood"]) / sum(of["tested"]))
    # Twice two answers of 9 tokens, the first of each from the prompt; a last one that is alone needs no round.
    in_rounds = of["tokens_per_round"] * of["rounds"]
    assert in_rounds == pytest.approx(round(in_rounds)) and 28 <= round(in_rounds) <= 32
    steps = StepSeconds(of["step_ms"], of["proposal_ms"], of["check_ms"])
    assert of["predicted_speedup"] == pytest.approx(speedup(of["acceptance"], 2, steps))
    assert of["predicted_tokens_per_round"] == pytest.approx(tokens_per_round(of["acceptance"], 2))
    assert row["peer"]["name"] == "plain decoder" and of["speedup"] == pytest.approx(
        max(row["raw"]) / row["peer"]["value"])
    assert "2 proposals, batch 2, greedy" in capsys.readouterr().out


def test_drawn_answers_and_a_second_batch(folder):
    pair = load_pair(folder, Drafts(noise=0.1), CPU, torch.float32, batch=3)
    row = speculation.measure(pair, speculation.Case(3, 3, 6, temperature=1.0), "plain forward", {"model": "tiny"}, 1)
    assert row["conditions"]["temperature"] == 1 and "temperature 1" in row["case"]
    assert 0 <= row["conditions"]["same_tokens"] <= 1


def test_the_fast_forward_takes_drafts_too(folder, heads):
    for drafts in (Drafts(checkpoint=folder), Drafts(heads=heads)):
        (row,) = speculation.run(folder, drafts, None, [speculation.Case(2, 2, 6)], forward="fast", experts="dense",
                                 repetitions=1)
        assert row["backend"] == "fast forward, dense experts" and row["conditions"]["same_tokens"] == 1
        assert row["conditions"]["acceptance"] == (1 if drafts.checkpoint else pytest.approx(0, abs=0.9))


def test_other_tokens_end_the_run(folder, monkeypatch):
    monkeypatch.setattr(speculation, "_same", lambda one, other: 0.5)
    with pytest.raises(RuntimeError, match="50.0% of the greedy tokens are those without drafts"):
        speculation.run(folder, Drafts(noise=0.1), None, [speculation.Case(1, 1, 4)], repetitions=1)


def test_what_is_compared():
    assert speculation._same([[1, 2], [3, 4]], [[1, 9], [3, 4]]) == 0.75
    with pytest.raises(ValueError, match="zip"):
        speculation._same([[1, 2]], [[1]])
    prompts = speculation.questions(8)
    assert len({tuple(p) for p in prompts}) == 8 and max(map(len, prompts)) - min(map(len, prompts)) <= 1


@pytest.mark.parametrize(("given", "said"), [
    ({}, "come from nowhere"), ({"noise": 0.1, "heads": "x"}, "come from noise and heads"),
    ({"noise": -1.0}, "noise is -1.0"), ({"noise": float("nan")}, "noise is nan"),
])
def test_drafts_come_from_one_place(given, said):
    with pytest.raises(ValueError, match=said):
        Drafts(**given)


def test_forwards_that_do_not_fit(folder, heads):
    with pytest.raises(ValueError, match="noise moves dense weights"):
        load_pair(folder, Drafts(noise=0.1), CPU, torch.float32, forward="fast")
    with pytest.raises(ValueError, match="forward is 'slow'"):
        load_pair(folder, Drafts(noise=0.1), CPU, torch.float32, forward="slow")
    with pytest.raises(ValueError, match="drafts of 3 tokens need as many heads; there are 2"):
        load_pair(folder, Drafts(heads=heads), CPU, torch.float32).drafting(3)


def test_a_noisy_copy_leaves_the_model_alone(folder):
    model, ids = load_model(folder, dtype=torch.float32), torch.arange(9)
    exact = model(ids, logits="all")
    errors = [(spoiled(model, noise)(ids, logits="all") - exact).norm().item() for noise in (0.0, 0.01, 0.1)]
    assert errors[0] == 0 < errors[1] < errors[2] and torch.equal(model(ids, logits="all"), exact)


def test_step_times_of_shapes(tmp_path, capsys):
    out = tmp_path / "steps.jsonl"
    tiny = dataclasses.replace(preset("nano").with_layers(2), name="big", num_experts=8, vocab_size=512)
    big, small = (Subject(dataclasses.replace(tiny, name=name), "mxfp4", "dense", CPU) for name in ("big", "small"))
    rows = speculation.steps(big, small, out, batches=(1, 2), lengths=(2,), tokens=40, readings=2)
    assert [(r["case"], r["conditions"]["batch"]) for r in rows] == [
        (case, batch) for case in ("a step", "a check of 3", "a proposal") for batch in (1, 2)]
    assert [r["conditions"]["model"] for r in rows] == ["big"] * 4 + ["small"] * 2
    assert all(len(r["raw"]) == 2 and 0 < r["bound"] < r["value"] for r in rows) and read_rows(out) == rows
    assert rows[2]["bound"] > rows[0]["bound"]
    assert "a check of 3" in capsys.readouterr().out


def test_the_command(folder, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "speculation", "--checkpoint", str(folder), "--draft-tokens", "2", "--batch", "1",
                 "--new-tokens", "5", "--repetitions", "1", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--noise", "0.1"])
    assert done.exit_code == 0, done.output
    (row,) = read_rows(out)
    assert row["conditions"]["draft"] == "the model with noise 0.1" and row["conditions"]["weights"] == "tiny"
    wrong = CliRunner().invoke(app, arguments)
    assert wrong.exit_code == 2 and "nowhere" in wrong.output
