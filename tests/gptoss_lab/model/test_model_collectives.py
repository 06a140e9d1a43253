"""The parts of a layer that ranks hold add up to the whole, and the collectives that are handed in are used."""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_lab.model import OneRank, build_model, choose_operations
from gptoss_lab.model.attention import Attention
from gptoss_lab.model.moe import ExpertProjection, MoE
from gptoss_lab.model.step import Step

CONFIG = config(num_layers=2)
COUNT = 20


@pytest.fixture(scope="module")
def model():
    return build_model(random_source(CONFIG), dtype=torch.float64)


@pytest.fixture(scope="module")
def x():
    return torch.randn(COUNT, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def step(model):
    return Step((0, COUNT), *model.rope(torch.arange(COUNT)), None, None)


@pytest.mark.parametrize("layer", [0, 1])
def test_heads_add_up(model, x, step, layer):
    """Two ranks with three query heads and one key head each; the output bias lies on the first."""
    whole, parts = model.layers[layer].attention, []
    for rank in range(2):
        part = Attention(layer, 96, 3, 1, 32, whole.window, model.operations, OneRank(), torch.float64)
        q, k, v = whole.qkv.weight.split([192, 64, 64])
        bq, bk, bv = whole.qkv.bias.split([192, 64, 64])
        queries, keys = slice(96 * rank, 96 * rank + 96), slice(32 * rank, 32 * rank + 32)
        part.load_state_dict({
            "qkv.weight": torch.cat([q[queries], k[keys], v[keys]]),
            "qkv.bias": torch.cat([bq[queries], bk[keys], bv[keys]]),
            "out.weight": whole.out.weight[:, queries], "out.bias": whole.out.bias if rank == 0 else 0 * whole.out.bias,
            "sinks": whole.sinks[3 * rank : 3 * rank + 3],
        }, assign=True)
        parts.append(part(x, step))
    assert distance(parts[0] + parts[1], whole(x, step)) <= 1e-13


def test_experts_add_up(model, x, step):
    whole, parts = model.layers[0].moe, []
    for first, last in ((0, 2), (2, 5)):
        own = [ExpertProjection(ExpertMatrices("dense", p.values[first:last]), p.bias[first:last])
               for p in (whole.gate_up, whole.down)]
        parts.append(MoE(0, whole.router, *own, 1.702, 7.0, model.operations, OneRank(), first_expert=first)(x, step))
    assert distance(parts[0] + parts[1], whole(x, step)) <= 1e-13


def test_collectives_are_called_in_order():
    calls = []

    class Recording(OneRank):
        def reduce_attention(self, part):
            calls.append("reduce_attention")
            return part

        def dispatch(self, x, ids, weights):
            calls.append("dispatch")
            return x, ids, weights

        def combine(self, part):
            calls.append("combine")
            return part

    source, ids = random_source(CONFIG), tokens(CONFIG, 9)
    logits = build_model(source, dtype=torch.float32, collectives=Recording())(ids)
    assert calls == ["reduce_attention", "dispatch", "combine"] * 2
    assert torch.equal(logits, build_model(source, dtype=torch.float32)(ids))


def test_a_sum_that_is_missing_shows():
    """A collective that drops half of the attention changes the logits: its result is what is used."""

    class Half(OneRank):
        def reduce_attention(self, part):
            return part / 2

    source, ids = random_source(CONFIG), tokens(CONFIG, 9)
    half = build_model(source, dtype=torch.float32, collectives=Half())(ids)
    assert distance(half, build_model(source, dtype=torch.float32)(ids)) > 0.01


def test_operations_for_a_device_and_form():
    assert choose_operations("cpu", torch.float32, "fp8", {"moe": "reference"}).moe.backend == "reference"
