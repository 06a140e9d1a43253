"""config.json in both layouts and all spellings; a missing, wrong or contradicting value is an error that names it."""
import copy
import dataclasses
import json
from pathlib import Path

import pytest

from gptoss_lab.config import PRESETS, ConfigError, ModelConfig, RopeConfig, preset

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"
C20 = preset("gpt-oss-20b")


def hf(**changes):
    return copy.deepcopy(C20.to_hf_dict()) | changes


def original(**changes):
    return C20.to_original_dict() | changes


def without(raw, key, inside=None):
    (raw if inside is None else raw[inside]).pop(key)
    return raw


# -- what is released ------------------------------------------------------------------------------------------------
def test_presets():
    assert list(PRESETS) == ["gpt-oss-20b", "gpt-oss-120b", "nano"]
    small, large = preset("gpt-oss-20b"), preset("gpt-oss-120b")
    assert (small.num_layers, small.num_experts) == (24, 32) and (large.num_layers, large.num_experts) == (36, 128)
    same = {f.name for f in dataclasses.fields(ModelConfig)} - {"name", "num_layers", "num_experts"}
    for name in same:
        assert getattr(small, name) == getattr(large, name)
    assert (small.q_size, small.kv_size, small.qkv_size, small.queries_per_kv) == (4096, 512, 5120, 8)
    assert small.rope == RopeConfig(150000.0, 32.0, 32.0, 1.0, 4096, truncate=False)
    assert small.max_position_embeddings == 32 * 4096 and small.vocab_size == 201088
    assert small.eos_token_ids == (200002, 199999, 200012) and small.pad_token_id == 199999


def test_nano():
    c = preset("nano")
    assert (c.num_layers, c.num_experts, c.experts_per_token) == (6, 16, 4)
    assert (c.hidden_size, c.intermediate_size) == (224, 288)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.sliding_window, c.vocab_size) == (8, 2, 64, 128, 201088)


def test_unknown_preset():
    with pytest.raises(ConfigError, match="no preset is called 'gpt-oss-7b'; there are gpt-oss-20b, gpt-oss-120b,"):
        preset("gpt-oss-7b")


def test_even_layers_slide():
    assert [C20.is_sliding(n) for n in range(4)] == [True, False, True, False]
    for layer in (-1, 24):
        with pytest.raises(ConfigError, match=f"layer {layer} does not exist; the model has layers 0..23"):
            C20.is_sliding(layer)


def test_with_layers():
    assert C20.with_layers(3) == dataclasses.replace(C20, num_layers=3)
    with pytest.raises(ConfigError, match="num_layers is 0"):
        C20.with_layers(0)


# -- both layouts and their spellings --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
def test_both_layouts_give_the_same(name):
    c = preset(name)
    assert ModelConfig.from_dict(c.to_hf_dict(), name) == ModelConfig.from_dict(c.to_original_dict(), name) == c


def test_original_keys_are_the_released_sixteen():
    assert set(original()) == {
        "num_hidden_layers", "num_experts", "experts_per_token", "vocab_size", "hidden_size", "intermediate_size",
        "swiglu_limit", "head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window",
        "initial_context_length", "rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta",
    }


def test_tiny_folders():
    one, two = ModelConfig.load(TINY / "hf"), ModelConfig.load(TINY / "original" / "config.json")
    assert (one.num_heads, one.num_kv_heads, one.sliding_window, one.swiglu_limit) == (24, 4, 6, 7.0)
    assert one.eos_token_ids == (2,) and one.pad_token_id == 1
    own = {"name", "eos_token_ids", "pad_token_id"}
    assert all(getattr(one, f.name) == getattr(two, f.name) for f in dataclasses.fields(one) if f.name not in own)
    assert (one.name, two.name) == ("hf", "original")


def test_rope_parameters_spelling():
    """As transformers 5 writes it again: theta inside, no rope_scaling."""
    raw = hf()
    raw["rope_parameters"] = raw.pop("rope_scaling") | {"rope_theta": raw.pop("rope_theta")}
    assert ModelConfig.from_dict(raw, "gpt-oss-20b") == C20


def test_transformers_writes_what_is_read(tmp_path):
    """The released dictionary through transformers' own class and its file."""
    transformers = pytest.importorskip("transformers")
    transformers.GptOssConfig(**hf()).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_scaling" not in written
    assert dataclasses.replace(ModelConfig.load(tmp_path), name="gpt-oss-20b") == C20


@pytest.mark.parametrize("key", ["experts_per_token", "num_experts_per_tok"])
def test_either_spelling_of_the_experts_per_token(key):
    assert ModelConfig.from_dict(without(hf(), key), "gpt-oss-20b") == C20


def test_old_key_of_the_rope_type():
    raw = hf()
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    assert ModelConfig.from_dict(raw, "gpt-oss-20b") == C20


def test_stop_tokens():
    assert ModelConfig.from_dict(hf(eos_token_id=200002)).eos_token_ids == (200002, 199999, 200012)
    assert ModelConfig.from_dict(hf(eos_token_id=[7, 8])).eos_token_ids == (7, 8)
    assert ModelConfig.from_dict(hf(eos_token_id=7)).eos_token_ids == (7,)


@pytest.mark.parametrize("stops", [(200002, 199999, 200012), (7,), (7, 8), (200002,), (200012, 200002)])
def test_stop_tokens_are_written_whole(stops):
    """The released three are written as the released file has them, one id; any others as a list."""
    raw = dataclasses.replace(C20, eos_token_ids=stops).to_hf_dict()
    assert ModelConfig.from_dict(raw).eos_token_ids == stops
    assert C20.to_hf_dict()["eos_token_id"] == 200002


def test_whole_and_broken_numbers_agree():
    """150000 and 150000.0 are one value in two spellings."""
    raw = hf(rope_theta=150000)
    raw["rope_scaling"]["rope_theta"] = 150000.0
    assert ModelConfig.from_dict(raw, "gpt-oss-20b") == C20


# -- missing keys ----------------------------------------------------------------------------------------------------
HF_KEYS = [
    "num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "sliding_window", "max_position_embeddings", "rope_theta",
    "rms_norm_eps", "swiglu_limit", "eos_token_id", "pad_token_id",
]


@pytest.mark.parametrize("key", HF_KEYS)
def test_missing_key_hf(key):
    with pytest.raises(ConfigError, match=f"config.json lacks {key}"):
        ModelConfig.from_dict(without(hf(), key))


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate"])
def test_missing_key_of_the_rope(key):
    with pytest.raises(ConfigError, match=f"config.json lacks {key} in rope_scaling"):
        ModelConfig.from_dict(without(hf(), key, inside="rope_scaling"))


@pytest.mark.parametrize("key", sorted(original()))
def test_missing_key_original(key):
    with pytest.raises(ConfigError, match=f"config.json lacks {key}"):
        ModelConfig.from_dict(without(original(), key))


def test_missing_rope():
    with pytest.raises(ConfigError, match=r"lacks rope_scaling \(or rope_parameters\)"):
        ModelConfig.from_dict(without(hf(), "rope_scaling"))


def test_both_experts_per_token_missing():
    raw = without(without(hf(), "experts_per_token"), "num_experts_per_tok")
    with pytest.raises(ConfigError, match="lacks num_experts_per_tok or experts_per_token"):
        ModelConfig.from_dict(raw)


def test_null_is_missing():
    with pytest.raises(ConfigError, match="config.json lacks vocab_size"):
        ModelConfig.from_dict(hf(vocab_size=None))


# -- contradictions and wrong values ---------------------------------------------------------------------------------
def test_two_spellings_that_disagree():
    with pytest.raises(ConfigError, match="contradicts itself: {'num_experts_per_tok': 4, 'experts_per_token': 2}"):
        ModelConfig.from_dict(hf(experts_per_token=2))


def test_two_thetas_that_disagree():
    raw = hf(rope_theta=10000.0)
    raw["rope_scaling"]["rope_theta"] = 150000.0
    with pytest.raises(ConfigError, match="contradicts itself.*rope_theta"):
        ModelConfig.from_dict(raw)


def test_two_contexts_that_disagree():
    with pytest.raises(ConfigError, match="contradicts itself.*initial_context_length"):
        ModelConfig.from_dict(hf(initial_context_length=8192))


def test_rope_scaling_and_rope_parameters_that_disagree():
    raw = hf()
    raw["rope_parameters"] = raw["rope_scaling"] | {"factor": 16.0}
    with pytest.raises(ConfigError, match="contradicts itself.*rope_scaling.factor.*rope_parameters.factor"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "llama"}, "model_type is 'llama'; gpt-oss has 'gpt_oss'"),
        ({"attention_bias": False}, "attention_bias is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"layer_types": ["full_attention"] * 24}, "layer_types must alternate"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types must alternate"),
        ({"hidden_size": 2881}, "hidden_size is 2881; MXFP4 needs a multiple of its group of 32"),
        ({"intermediate_size": 16}, "intermediate_size is 16"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_layers is 0; a positive whole number is expected"),
        ({"vocab_size": "201088"}, "vocab_size is '201088'; a positive whole number"),
        ({"vocab_size": 201088.0}, "vocab_size is 201088.0; a positive whole number"),
        ({"head_dim": True}, "head_dim is True"),
        ({"head_dim": 63}, "head_dim is 63; rotary positions need an even one"),
        ({"sliding_window": -128}, "sliding_window is -128"),
        ({"num_key_value_heads": 7}, "num_heads 64 is not a multiple of num_kv_heads 7"),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, "experts_per_token 33 exceeds num_experts 32"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; a positive number"),
        ({"swiglu_limit": -7.0}, "swiglu_limit is -7.0; a positive number"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit is nan; a positive number"),
        ({"rope_theta": 0}, "rope theta is 0; a positive number"),
        ({"eos_token_id": "200002"}, "eos_token_id is '200002'"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]"),
        ({"eos_token_id": [200002, -1]}, "eos_token_id is .*-1"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
    ],
)
def test_wrong_value(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict(hf(**change))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("rope_type", "linear", "rope_scaling.rope_type is 'linear'; gpt-oss uses 'yarn'"),
        ("factor", "32", "rope factor is '32'"),
        ("factor", -32.0, "rope factor is -32.0"),
        ("truncate", "no", "rope truncate is 'no'; true or false"),
        ("beta_fast", 0, "rope beta_fast is 0"),
        ("beta_slow", 64.0, "rope beta_slow 64.0 must be below beta_fast 32.0"),
    ],
)
def test_wrong_rope(key, value, words):
    raw = hf()
    raw["rope_scaling"][key] = value
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_experts": 2}, "experts_per_token 4 exceeds num_experts 2"),
        ({"rope_scaling_factor": "x"}, "rope factor is 'x'"),
        ({"initial_context_length": 0}, "rope original_context is 0"),
        ({"head_dim": 64.5}, "head_dim is 64.5"),
    ],
)
def test_wrong_value_original(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict(original(**change))


# -- files -----------------------------------------------------------------------------------------------------------
def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="no config.json at .*config.json; a checkpoint folder holds one"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    "text, words", [("{", "is not JSON"), ("[1]", "holds a list; a JSON object"), ("\xff", "is not JSON")]
)
def test_broken_file(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=words):
        ModelConfig.load(tmp_path)


def test_written_file_reads_back(tmp_path):
    for layout in (C20.to_hf_dict(), C20.to_original_dict()):
        (tmp_path / "config.json").write_text(json.dumps(layout))
        assert dataclasses.replace(ModelConfig.load(tmp_path), name="gpt-oss-20b") == C20
