"""The tiny checkpoint: float64 logits written by an independent program, the same from both layouts, from MXFP4 codes
or dense experts, and from its conversions."""
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import config, distance, tokens

from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies
from gptoss_lab.checkpoint import synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.model import load_model

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"


@pytest.fixture(scope="module")
def ids():
    return torch.from_numpy(np.load(TINY / "ids.npy"))


@pytest.fixture(scope="module")
def expected():
    return torch.from_numpy(np.load(TINY / "ref_logits.npy"))


@pytest.mark.parametrize("storage", ["stored", "dense"])
@pytest.mark.parametrize("layout", ["hf", "original"])
def test_logits_fp32(ids, expected, layout, storage):
    model = load_model(TINY / layout, dtype=torch.float32, expert_storage=storage)
    got = model(ids, logits="all")
    assert got.dtype == torch.float32 and got.shape == (29, 320)
    assert distance(got, expected) <= 1e-5


def test_logits_fp64(ids, expected):
    """With angles in float64 as in the program that wrote the logits, only float64 rounding is left."""
    model = load_model(TINY / "hf", dtype=torch.float64)
    rope = model.config.rope
    omega = rope_frequencies(model.config.head_dim, rope.theta, rope.factor)

    class Exact(torch.nn.Module):
        def forward(self, positions):
            angle, m = positions.double()[:, None] * omega, rope_concentration(rope.factor)
            return angle.cos() * m, angle.sin() * m

    model.rope = Exact()
    assert distance(model(ids, logits="all"), expected) <= 1e-12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random checkpoint whose matrices span several and partial 128x128 blocks, in every form it converts to."""
    root = tmp_path_factory.mktemp("forms")
    c = config(num_layers=2, hidden_size=160, intermediate_size=288)
    made = {layout: synth(c, root / layout, layout=layout) for layout in ("hf", "original")}
    for name, options in {
        "fp8": {"to": "fp8"}, "bf16": {"to": "bf16"}, "bf16 in_out": {"to": "bf16", "experts_order": "in_out"},
        "fp8 amax": {"to": "fp8", "scales": "amax"}, "fp8 attention": {"to": "fp8", "attention_fp8": True},
    }.items():
        made[name] = convert(made["hf"], root / name.replace(" ", "_"), **options).path
    return made


@pytest.mark.parametrize("storage", ["stored", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_exact_form_gives_the_same_bits(folders, dtype, storage):
    """Both layouts, the FP8 and both bf16 conversions hold the same weights, so their logits are bit-equal."""
    ids, forms = tokens(config(), 30), {"hf": "mxfp4", "original": "mxfp4", "fp8": "fp8", "bf16": "dense"}
    one = load_model(folders["hf"], dtype=dtype, expert_storage="dense")(ids, logits="all")
    for name, form in forms.items():
        model = load_model(folders[name], dtype=dtype, expert_storage=storage)
        assert model.layers[1].moe.down.form == (form if storage == "stored" else "dense")
        assert torch.equal(model(ids, logits="all"), one), name
    turned = load_model(folders["bf16 in_out"], dtype=dtype, expert_storage=storage)(ids, logits="all")
    assert distance(turned, one) <= (1e-6 if dtype == torch.float32 else 1e-2)   # another memory order, another sum


@pytest.mark.parametrize("name", ["fp8 amax", "fp8 attention"])
def test_rounding_conversions_change_little(folders, name):
    ids = tokens(config(), 30)
    one = load_model(folders["hf"], dtype=torch.float32)(ids, logits="all")
    got = load_model(folders[name], dtype=torch.float32)(ids, logits="all")
    assert 1e-4 < ((got - one).norm() / one.norm()).item() < 0.2


def test_tiny_converted(ids, expected, tmp_path):
    model = load_model(convert(TINY / "original", tmp_path / "fp8", exact=True).path, dtype=torch.float32)
    assert distance(model(ids, logits="all"), expected) <= 1e-5
