"""Which checkpoint a notebook uses, that its FP8 copy is made once, and that nothing local is printed."""
from pathlib import Path

import numpy as np
import pytest
import torch

from gptoss_lab.checkpoint import CheckpointError, manifest, open_checkpoint
from gptoss_lab.viz import peer, session

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(session.SETTING, str(TINY / "hf"))
    return session.open_chosen()


def test_the_named_checkpoint_is_used_and_described_without_its_folder(tiny):
    assert session.chosen_checkpoint() == TINY / "hf"
    line = session.describe(tiny)
    assert f"{tiny.nbytes:,} bytes" in line and "the weights of GPTOSS_LAB_CHECKPOINT" in line and str(TINY) not in line


def test_a_named_checkpoint_that_does_not_exist_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv(session.SETTING, str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="GPTOSS_LAB_CHECKPOINT names .*nothing"):
        session.open_chosen()


def test_without_a_name_it_is_the_nano_checkpoint(monkeypatch, tmp_path):
    monkeypatch.delenv(session.SETTING, raising=False)
    monkeypatch.setattr(session, "ensure_nano", lambda: tmp_path)
    assert session.chosen_checkpoint() == tmp_path
    monkeypatch.setattr(session, "trained_nano", lambda: None)
    assert session.has_random_weights()
    monkeypatch.setattr(session, "trained_nano", lambda: tmp_path / "nano.safetensors")
    assert not session.has_random_weights()


def test_the_fp8_copy_is_made_once_and_accounts_for_every_tensor(tiny, monkeypatch):
    copy, made = session.fp8_copy(tiny)
    assert copy.layout == "fp8" and len(made["rows"]) == len(manifest(tiny.config, "fp8"))
    assert made["totals"]["tensors_read"] == len(tiny.specs)
    monkeypatch.setattr(session, "convert", None)                 # a second conversion would fail
    assert session.fp8_copy(tiny)[0].path == copy.path


def test_a_converted_checkpoint_is_no_start(tiny, monkeypatch):
    monkeypatch.setenv(session.SETTING, str(session.fp8_copy(tiny)[0].path))
    with pytest.raises(CheckpointError, match="in the fp8 layout"):
        session.open_chosen()


def test_release_says_what_is_left():
    assert "GPU memory" in session.release()


# -- peer --------------------------------------------------------------------------------------------------------------
def test_transformers_agrees_with_the_fp64_logits_of_the_fixture():
    ids = torch.from_numpy(np.load(TINY / "ids.npy")).long().flatten()
    expected = torch.from_numpy(np.load(TINY / "ref_logits.npy"))
    found = peer.transformers_logits(open_checkpoint(TINY / "hf"), ids)
    assert peer.distance(found, expected.reshape(found.shape)) <= 1e-5


def test_a_comparison_that_cannot_be_made_says_why(monkeypatch):
    original = open_checkpoint(TINY / "original")
    with pytest.raises(RuntimeError, match="layout hf, not original"):
        peer.transformers_logits(original, torch.tensor([1]))
    monkeypatch.setattr(peer, "LARGEST", 10)
    assert "up to 10 are compared" in peer.obstacle(open_checkpoint(TINY / "hf"))
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    assert peer.obstacle(open_checkpoint(TINY / "hf")) == "transformers is not installed"


def test_a_writer_loads_at_the_first_call_and_once(tiny, monkeypatch):
    from gptoss_lab.engine import SamplingParams

    loaded, load = [], session.load_model
    monkeypatch.setattr(session, "load_model", lambda *a: loaded.append(a) or load(*a))
    write = session.writer(SamplingParams(temperature=0, max_new_tokens=3, stop_ids=()))
    assert loaded == []
    first = write([5, 6, 7])
    assert len(first) == 3 and write([5, 6, 7]) == first and len(loaded) == 1
