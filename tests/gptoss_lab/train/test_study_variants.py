"""Each variant changes what it says and FP8 exact changes nothing; every changed operation against its formula."""
import math
from dataclasses import replace

import pytest
import torch

from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.registry import BackendUnavailable, choose
from gptoss_lab.checkpoint import CheckpointError, open_checkpoint
from gptoss_lab.config import preset
from gptoss_lab.model import Recorder, build_model
from gptoss_lab.model.operations import choose_operations
from gptoss_lab.train.study import backends, variants
from gptoss_lab.train.study.caches import rounded
from gptoss_lab.train.study.source import StudySource
from gptoss_lab.train.study.variants import BASELINE, CONTROL, PLAIN, VARIANTS, Forms, build

SAME = {CONTROL.name, "FP8 exact"}
CPU = torch.device("cpu")


def logits_of(model, studied):
    """[T, rows] of three dialogues in one batch, through caches."""
    ids = [studied.rows.compact(d.ids) for d in studied.rendered[:3]]
    flat = torch.tensor([row for one in ids for row in one])
    with torch.inference_mode():
        return model(flat, [len(one) for one in ids], [model.new_cache(len(one)) for one in ids], logits="all")


def built(variant, studied):
    prompts = [studied.rows.compact(d.ids) for d in studied.rendered[3:6]]
    return build(variant, studied.forms, studied.rows, prompts, CPU)


@pytest.fixture(scope="module")
def baseline(studied):
    return logits_of(built(BASELINE, studied), studied)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_variant_changes_the_logits_unless_it_is_exact(variant, studied, baseline):
    found = logits_of(built(variant, studied), studied)
    if variant.name in SAME:
        assert torch.equal(found, baseline)
    else:
        assert torch.isfinite(found).all() and float((found - baseline).abs().max()) > 0


def test_fp8_exact_is_exact_when_experts_are_decoded_as_they_are_used(studied, baseline):
    checkpoint = open_checkpoint(studied.forms.path("fp8"))
    source = StudySource(checkpoint, studied.rows, checkpoint.config)
    model = build_model(source, CPU, torch.bfloat16, expert_storage="stored", backends=PLAIN)
    assert model.layers[0].moe.gate_up.form == "fp8" and torch.equal(logits_of(model, studied), baseline)


def test_names_are_unique_and_known():
    assert len({v.name for v in (BASELINE, *VARIANTS)}) == len(VARIANTS) + 1
    assert variants.choose(None) == VARIANTS
    assert [v.name for v in variants.choose(["KV in FP8", "FP8 exact"])] == ["FP8 exact", "KV in FP8"]
    with pytest.raises(ValueError, match="no variant is called 'fp7'; there are other batches, FP8 exact"):
        variants.choose(["fp7"])


def test_the_constants_that_change_are_the_ones_named():
    config, by_name = preset("nano"), {v.name: v for v in VARIANTS}
    assert by_name["window - 1"].config(config) == replace(config, sliding_window=127)
    assert by_name["window + 1"].config(config) == replace(config, sliding_window=129)
    assert by_name["YaRN rounded"].config(config) == replace(config, rope=replace(config.rope, truncate=True))
    assert all(v.config(config) == config for v in VARIANTS if "window" not in v.name and "YaRN" not in v.name)


def test_sinks_ignored_takes_no_probability(studied):
    seen = Recorder("sink_mass")
    model = built(next(v for v in VARIANTS if not v.sinks), studied)
    with torch.inference_mode():
        model(torch.tensor(studied.rows.compact(studied.rendered[0].ids)), logits="none", observe=seen)
    assert seen.stacked("sink_mass").abs().max() == 0


def test_only_the_study_gets_its_backends():
    for operation, name in (("route", backends.BEFORE), ("moe", backends.ACTIVATIONS)):
        with pytest.raises(BackendUnavailable, match="only gptoss_lab.train.study asks for it"):
            choose(operation, name, device=CPU, dtype=torch.bfloat16, expert_form="dense")
        with backends.studying():
            assert choose(operation, name, device=CPU, dtype=torch.bfloat16, expert_form="dense").backend == name
            assert not choose(operation, device=CPU, dtype=torch.bfloat16, expert_form="dense").backend.startswith("st")
    assert all(not name.startswith("study") for _, name, _ in choose_operations(CPU).table())


def softmax(values):
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def test_routers_against_their_formulas():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 3
    for row, ids, weights in zip(logits.tolist(), *backends.route_softmax_before(logits, 3), strict=True):
        best = sorted(range(7), key=lambda e: -row[e])[:3]
        assert ids.tolist() == best
        assert weights.tolist() == pytest.approx([softmax(row)[e] for e in best], rel=1e-5)
        assert float(weights.sum()) < 1
    ids, weights = backends.route_rounded_weights(logits, 3)
    for row, i, w in zip(logits.tolist(), ids.tolist(), weights, strict=True):
        exact = torch.tensor(softmax([row[e] for e in i]))
        assert torch.equal(w, exact.bfloat16().float()) or torch.allclose(w, exact, rtol=2**-8, atol=0)
        assert torch.equal(w, w.bfloat16().float()) and w.dtype == torch.float32
    ids, weights = backends.route_rounded_logits(logits, 3)
    low = logits.bfloat16().double()
    for row, i, w in zip(low.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert [row[e] for e in i] == sorted(row, reverse=True)[:3]
        assert w == pytest.approx(softmax([row[e] for e in i]), rel=1e-5)
    assert not torch.equal(weights, backends.route_rounded_weights(logits, 3)[1])


def e4m3(values):
    """Values [K] in float64 through e4m3, groups of 128 with scale amax / 448."""
    found = []
    for group in values.double().split(128):
        scale = (group.abs().max() / 448).float().double()
        found.append((group.float() / scale.float()).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(found)


def test_expert_activations_against_the_formula():
    g = torch.Generator().manual_seed(0)
    up, down = (torch.randn(*shape, generator=g).bfloat16() / 12 for shape in ((3, 96, 160), (3, 160, 48)))
    up_bias, down_bias = (torch.randn(3, n, generator=g).bfloat16() for n in (96, 160))
    x = torch.randn(5, 160, generator=g).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    weights = torch.rand(5, 2, generator=g)
    found = backends.moe_with_e4m3_activations(
        x.float(), ids, weights, ExpertMatrices("dense", up), up_bias, ExpertMatrices("dense", down), down_bias)
    for t in range(5):
        total = torch.zeros(160, dtype=torch.float64)
        for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            u = up[e].double() @ e4m3(x[t]) + up_bias[e].double()
            gate, linear = u[0::2].clamp(max=7.0), u[1::2].clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
            total += weight * (down[e].double() @ e4m3(h) + down_bias[e].double())
        # a rounding of h that falls on the other side moves one of 48 columns by 1/16 of its size
        assert torch.allclose(found[t].double(), total, rtol=0, atol=0.02 * float(total.abs().max()))


def test_what_enters_an_fp8_cache_is_e4m3_times_the_head_s_scale(studied):
    model = built(next(v for v in VARIANTS if v.fp8_cache), studied)
    cache = model.new_cache(8)
    rows, scale = torch.randn(9, 2, 64).bfloat16() * 3, torch.tensor([0.01, 0.5])
    for head, s in enumerate(scale):
        codes = (rows[:, head].float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(rounded(rows, scale)[:, head], (codes.float() * s).bfloat16())
    with torch.inference_mode():
        model(torch.tensor(studied.rows.compact(studied.rendered[0].ids)), caches=[cache])
    kept, scales = cache.layers[1].keys.float(), model.scales[0][1]
    codes = kept / scales[:, None]
    assert float((codes - codes.to(torch.float8_e4m3fn).float()).abs().max()) <= 448 * 2**-8
    assert cache.length == len(studied.rendered[0].ids) and float(codes.abs().max()) > 50


def test_the_study_starts_from_mxfp4(studied, tmp_path):
    with pytest.raises(CheckpointError, match="is in the fp8 layout; the study starts from MXFP4 weights"):
        Forms(studied.forms.path("fp8"), tmp_path)
    assert Forms(studied.forms.path("mxfp4"), tmp_path).path("mxfp4") == studied.forms.path("mxfp4")
