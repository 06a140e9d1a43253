"""Weights made in memory are byte for byte those that `synth` writes."""
import pytest
import torch
from checkpoint_helpers import SMALL

from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.checkpoint import synthetic as module
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import manifest
from gptoss_lab.checkpoint.synthetic import Synthetic


@pytest.mark.parametrize("piece", [1 << 25, 1 << 10])
def test_every_tensor_is_what_synth_writes(tmp_path, monkeypatch, piece):
    there = open_checkpoint(synth(SMALL, tmp_path / "there", seed=5, spread=9))
    monkeypatch.setattr(module, "_PIECE", piece)
    here = Synthetic(SMALL, seed=5, spread=9)
    for spec in manifest(SMALL, "hf"):
        assert torch.equal(here.tensor(spec.name), there.tensor(spec.name)), spec.name
    assert torch.equal(here.experts(1, "down_proj").blocks, there.experts(1, "down_proj").blocks)
    assert torch.equal(here.linear("model.layers.0.self_attn.k_proj").weight,
                       there.linear("model.layers.0.self_attn.k_proj").weight)


def test_fewer_layers_are_the_same_layers_and_the_seed_matters():
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    assert torch.equal(Synthetic(SMALL).tensor(name), Synthetic(SMALL.with_layers(1)).tensor(name))
    assert not torch.equal(Synthetic(SMALL).tensor(name), Synthetic(SMALL, seed=1).tensor(name))


def test_what_is_not_there():
    with pytest.raises(KeyError, match="model.layers.99"):
        Synthetic(SMALL).tensor("model.layers.99.mlp.router.weight")
    with pytest.raises(CheckpointError, match="up_proj"):
        Synthetic(SMALL).experts(0, "up_proj")
