"""Roundings of a router: what they may change, and that the hooks and the comparison measure it."""
import math

import pytest
import torch

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.harmony import encode
from gptoss_lab.model import load_model
from gptoss_lab.viz import moe_precision as precision

FP32, BF16 = torch.float32, torch.bfloat16
IDS = torch.tensor(encode("What is 37 + 48? 7+8=15, write 5, carry 1."))       # of nano's own vocabulary rows


@pytest.fixture(scope="module")
def model():
    return load_model(ensure_nano(), "cpu", FP32)


@pytest.fixture(scope="module")
def exact(model):
    return precision.observe(model, IDS)


def test_hooks_that_round_nothing_change_nothing_and_leave_nothing(model, exact):
    with precision.routed_by(model, precision.round_to((FP32, FP32, FP32))):
        same = precision.observe(model, IDS)
    effect = precision.compare("none", same, exact)
    assert effect.sets_changed == 0 and effect.kl < 1e-9 and effect.logit_error < 1e-5
    assert torch.equal(precision.observe(model, IDS).logits, exact.logits)
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_leave_after_an_error(model):
    with pytest.raises(KeyError), precision.routed_by(model, precision.round_to((FP32, FP32, FP32))):
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())


def test_rounded_weights_reach_the_output_but_not_the_first_choice(model, exact):
    with precision.routed_by(model, precision.round_to((FP32, FP32, BF16))):
        low = precision.observe(model, IDS)
    assert torch.equal(low.ids[0], exact.ids[0]) and not torch.equal(low.logits, exact.logits)


def test_replayed_experts_are_the_other_passes(model, exact):
    other = exact.ids.roll(1, dims=1)
    assert not torch.equal(other[2], exact.ids[2])
    with precision.routed_by(model, precision.replay(other)):
        seen = []
        hook = model.layers[2].moe.router.register_forward_hook(lambda module, given, out: seen.append(out))
        model(IDS)
        hook.remove()
    ids, weights, logits = seen[0]
    assert torch.equal(ids, other[2])
    assert torch.allclose(weights, torch.softmax(logits.gather(-1, ids), -1))


def test_the_models_own_bf16_router_is_all_three_roundings():
    path = ensure_nano()
    reference = precision.observe(load_model(path, "cpu", BF16, router_dtype=BF16), IDS)
    model = load_model(path, "cpu", BF16)
    with precision.routed_by(model, precision.round_to((BF16, BF16, BF16))):
        ours = precision.observe(model, IDS)
    assert torch.equal(ours.ids[0], reference.ids[0]) and torch.equal(ours.weights[0], reference.weights[0])


def test_compare_in_closed_form():
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    ids = torch.tensor([[[0, 1], [2, 3]]])
    weights = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    exact = precision.Pass(logits + 1, ids, weights, logits[None])
    chances = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    other = precision.Pass(chances.log(), torch.tensor([[[1, 0], [2, 1]]]),
                           torch.tensor([[[0.25, 0.75], [0.9, 0.1]]]), logits[None])
    effect = precision.compare("x", other, exact)
    assert effect.sets_changed == 0.5 and effect.weight_error == 0.25 and effect.top_changed == 0.5
    far = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert effect.kl == pytest.approx(far / 2, rel=1e-5)


def test_rounded_by_hand():
    row = torch.tensor([[100.75, 100.5, 100.25, 100.0]], dtype=torch.float64)
    ids, weights = precision.rounded(row, 2, (BF16, FP32, BF16))
    assert ids.tolist() == [[0, 1]] and weights.dtype == BF16
    assert torch.allclose(weights.float(), torch.softmax(torch.tensor([[101.0, 100.5]]), -1), atol=2**-9)


def test_a_common_offset_matters_only_through_the_rounding():
    near, far = precision.offset_changes([0.0, 32.0], 128, tokens=500)
    logits = torch.randn(3, 200, 32, generator=torch.Generator().manual_seed(0))
    assert near < 0.06 < 0.2 < far
    tables = precision.roundings_table(logits, 4).frame
    assert tables["expert sets changed, %"].tolist()[:3] == ["0.00"] * 3
    assert float(tables["largest weight error"][1]) <= 2**-9 + 1e-6


def test_the_study_holds_every_row():
    found = precision.study(ensure_nano(), IDS, torch.device("cpu"))
    assert len(found.to_exact) == 7 and len(found.to_reference) == 4
    assert found.to_exact[precision.REPLAYED].sets_changed == 0
    assert found.to_exact[precision.REPLAYED].kl <= found.to_exact[precision.IN_FP32].kl
    assert found.to_reference[precision.ALL_ROUNDED].kl <= found.to_reference[precision.IN_FP32].kl
    frame = precision.effects_table(found.to_exact.values(), "fp32").frame
    assert len(frame) == 7 and set(frame["origin"]) == {"live"}
