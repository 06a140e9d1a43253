"""The list of tensors against the published totals and against real headers."""
import pytest
from checkpoint_helpers import SMALL, TINY
from safetensors import safe_open

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import (
    LAYOUTS,
    bytes_by_role,
    count_active,
    count_parameters,
    layer_of,
    manifest,
    total_bytes,
)
from gptoss_lab.checkpoint.names import hf_parts, original_source
from gptoss_lab.config import ModelConfig, preset


@pytest.mark.parametrize(
    ("name", "hf", "original", "size", "parameters", "active", "fp8", "fp8_scales", "bf16"),
    [
        ("gpt-oss-20b", 459, 363, 13_761_264_768, 20_914_757_184, 3_608_307_264, 22_719_216_768, 4_804_608,
         41_829_514_368),
        ("gpt-oss-120b", 687, 543, 65_248_815_744, 116_829_156_672, 5_132_849_472, 118_996_527_744, 28_827_648,
         233_658_313_344),
    ],
)
def test_published_totals(name, hf, original, size, parameters, active, fp8, fp8_scales, bf16):
    config = preset(name)
    assert len(manifest(config, "hf")) == hf
    assert len(manifest(config, "original")) == original
    assert total_bytes(manifest(config, "hf")) == total_bytes(manifest(config, "original")) == size
    assert count_parameters(config) == parameters
    assert count_active(config) == active
    assert total_bytes(manifest(config, "fp8")) == fp8 + fp8_scales
    for order in ("out_in", "in_out"):
        assert total_bytes(manifest(config, "bf16", experts_order=order)) == bf16


def test_parts_of_the_released_bytes():
    config = preset("gpt-oss-20b")
    roles = bytes_by_role(manifest(config, "hf"))
    assert roles["expert weights"] == 9_555_148_800
    assert roles["expert scales"] == 597_196_800
    assert roles["embedding"] == roles["unembedding"] == 2 * 579_133_440
    assert roles["attention"] + roles["sinks"] + roles["norms"] == 2 * (637_272_576 + 69_120 + 2_880)
    assert roles["router"] == 2 * 2_212_608
    assert roles["expert biases"] == 2 * 6_635_520
    assert sum(roles.values()) == 13_761_264_768
    assert bytes_by_role(manifest(config, "original")) == roles


def test_attention_in_fp8_saves_what_the_shapes_say():
    config = preset("gpt-oss-20b")
    lean, full = (total_bytes(manifest(config, "fp8", attention_fp8=on)) for on in (True, False))
    scales = 24 * 4 * (2 * 4 * 23 + 32 * 23 + 23 * 32)
    assert full - lean == 24 * (4096 * 2880 + 2 * 512 * 2880 + 2880 * 4096) - scales


def test_scales_of_a_partial_block_count_up():
    shapes = {spec.name: spec.shape for spec in manifest(preset("gpt-oss-20b"), "fp8")}
    assert shapes["model.layers.0.mlp.experts.down_proj.weight_scale_inv"] == (32, 23, 23)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj.weight_scale_inv"] == (32, 45, 23)


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_the_fixture_holds_exactly_the_manifest(layout):
    specs = {spec.name: spec for spec in manifest(ModelConfig.load(TINY / layout), layout)}
    with safe_open(TINY / layout / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(specs)
        for name, spec in specs.items():
            part = file.get_slice(name)
            assert tuple(part.get_shape()) == spec.shape
            assert part.get_dtype() == spec.dtype


@pytest.mark.parametrize("config", [SMALL, preset("gpt-oss-20b")], ids=lambda c: c.name)
def test_names_map_one_to_one_and_back(config):
    hf = {spec.name: spec for spec in manifest(config, "hf")}
    original = {spec.name: spec for spec in manifest(config, "original")}
    seen = []
    for name, spec in original.items():
        end = 0
        for part in hf_parts(name, config):
            at = original_source(part, config)
            assert at.name == name and layer_of(part) == layer_of(name)
            assert at.start == end
            end += hf[part].shape[0]
            assert at.stop in (end, None) and hf[part].shape[1:] == spec.shape[1:]
            seen.append(part)
        assert end == spec.shape[0]
    assert sorted(seen) == sorted(hf)


def test_layout_sums_do_not_depend_on_the_layout():
    for layout in LAYOUTS:
        assert sum(spec.parameters for spec in manifest(SMALL, layout)) == count_parameters(SMALL)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: manifest(SMALL, "gguf"), "gguf"),
        (lambda: manifest(SMALL, "bf16", experts_order="transposed"), "transposed"),
        (lambda: manifest(SMALL, "bf16", attention_fp8=True), "attention_fp8"),
        (lambda: original_source("model.layers.0.mlp.experts.gate_up_proj.weight", SMALL), "gate_up_proj.weight"),
        (lambda: original_source("transformer.h.0", SMALL), "transformer.h.0"),
        (lambda: hf_parts("block.0.attn.rotary", SMALL), "block.0.attn.rotary"),
    ],
)
def test_what_does_not_exist_is_named(call, word):
    with pytest.raises(CheckpointError, match=word) as error:
        call()
    assert "\n" not in str(error.value)
