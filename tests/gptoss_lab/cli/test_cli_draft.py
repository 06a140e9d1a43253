"""`gptoss-lab generate --draft`: the same tokens, and how many proposals stood."""
import dataclasses

import pytest
from typer.testing import CliRunner

from gptoss_lab.checkpoint import synth
from gptoss_lab.cli.main import app
from gptoss_lab.config import preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, eos_token_ids=(3,), pad_token_id=0)
    path = tmp_path_factory.mktemp("draft")
    synth(config, path / "model")
    synth(dataclasses.replace(config, vocab_size=49), path / "other")
    return path


def run(folder, *arguments):
    return CliRunner().invoke(app, ["generate", "1,2,3", "4", "--no-stop", "--temperature", "0", "--max-tokens", "17",
                                    "--dtype", "float32", "--checkpoint", str(folder / "model"), *arguments])


def test_the_tokens_are_those_without_a_draft(folder):
    plain = run(folder)
    drafted = run(folder, "--draft", str(folder / "model"), "--draft-tokens", "3", "--stats")
    assert plain.exit_code == drafted.exit_code == 0
    assert drafted.stdout == plain.stdout and len(plain.stdout.splitlines()) == 2
    assert "24 of 24 proposals accepted, 4.00 tokens a round" in drafted.stderr


def test_a_draft_with_another_vocabulary(folder):
    result = run(folder, "--draft", str(folder / "other"))
    assert result.exit_code != 0
    said = result.stderr or str(result.exception)
    assert "the draft model has 49 token ids and the model 50" in said
