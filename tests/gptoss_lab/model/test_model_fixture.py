"""The tiny checkpoint: float64 logits written by an independent program, the same from both layouts, from MXFP4 codes
or dense experts, and from its conversions."""
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import distance

from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies
from gptoss_lab.checkpoint import fp8
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.stored import Fp8
from gptoss_lab.model import load_model
from gptoss_lab.model.load import build_model

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


class Converted:
    """The tiny checkpoint with its experts turned into FP8 blocks."""

    def __init__(self, source):
        self._source, self.config = source, source.config
        self.tensor, self.linear = source.tensor, source.linear

    def experts(self, layer, projection, *, device=None):
        stored = self._source.experts(layer, projection)
        weight, scale, report = fp8.from_mxfp4(stored.blocks, stored.scales)
        assert report.exact and report.blocks > 0
        return Fp8(weight, scale)


@pytest.mark.parametrize("storage", ["stored", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_form_gives_the_same_bits(ids, dtype, storage):
    """Both layouts, codes or dense, and an exact FP8 conversion hold the same weights, so the logits are bit-equal."""
    one = load_model(TINY / "hf", dtype=dtype, expert_storage="dense")(ids, logits="all")
    assert torch.equal(load_model(TINY / "original", dtype=dtype, expert_storage=storage)(ids, logits="all"), one)
    converted = build_model(Converted(open_checkpoint(TINY / "hf")), dtype=dtype, expert_storage=storage)
    assert converted.layers[0].moe.gate_up.form == ("fp8" if storage == "stored" else "dense")
    assert torch.equal(converted(ids, logits="all"), one)
