"""Parameters, distinct experts, bytes and FLOPs of a pass: closed forms, brute force, and the file of a model."""
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.cost import (
    SERVED,
    CostError,
    Plan,
    Precision,
    decode,
    expected_distinct_experts,
    forward_parts,
    prefill,
    total,
    verify,
    weight_bytes_per_gpu,
)
from gptoss_lab.cost.parameters import active_parameter_count, parameter_counts
from gptoss_lab.cost.precision import matrix_bytes
from gptoss_lab.cost.workload import full_pairs, window_pairs

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"


def _parts(*args, **kwargs):
    return {part.name: part for part in forward_parts(*args, **kwargs)}


def _tiny_tensors(layout="hf"):
    """name -> (dtype, shape, bytes) from the header of the fixture's safetensors file."""
    with (TINY / layout / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return {name: (x["dtype"], x["shape"], x["data_offsets"][1] - x["data_offsets"][0])
            for name, x in header.items() if name != "__metadata__"}


# -- parameters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "whole", "active", "with_embedding", "without_both"),
    [("gpt-oss-20b", 20_914_757_184, 3_608_307_264, 4_187_440_704, 3_029_173_824),
     ("gpt-oss-120b", 116_829_156_672, 5_132_849_472, 5_711_982_912, 4_553_716_032)],
)
def test_parameter_counts_of_the_model_cards(name, whole, active, with_embedding, without_both):
    config = preset(name)
    assert sum(parameter_counts(config).values()) == whole
    assert active_parameter_count(config) == active
    assert active_parameter_count(config, embedding=True) == with_embedding
    assert active_parameter_count(config, head=False) == without_both


# -- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["hf", "original"])
def test_stored_bytes_equal_a_checkpoint_file(layout):
    config = ModelConfig.load(TINY / layout)
    stored = sum(size for _, _, size in _tiny_tensors(layout).values())
    assert weight_bytes_per_gpu(config, Precision(experts="mxfp4")) == stored


@pytest.mark.parametrize(
    ("name", "mxfp4", "bf16", "fp8"),
    [("gpt-oss-20b", 13_761_264_768, 41_829_514_368, 22_719_216_768 + 4_804_608),
     ("gpt-oss-120b", 65_248_815_744, 233_658_313_344, 118_996_527_744 + 28_827_648)],
)
def test_stored_bytes_of_the_released_models(name, mxfp4, bf16, fp8):
    config = preset(name)
    for experts, size in (("mxfp4", mxfp4), ("bf16", bf16), ("fp8", fp8)):
        assert weight_bytes_per_gpu(config, Precision(experts=experts)) == size


def test_projections_in_fp8_save_a_byte_per_weight_less_their_scales(b20):
    scales = 24 * 4 * (40 * 23 + 23 * 32)               # QKV 5120 x 2880, output 2880 x 4096, blocks of 128 x 128
    assert weight_bytes_per_gpu(b20, SERVED) == 22_082_206_848 + 4_804_608 + scales


@pytest.mark.parametrize(
    ("name", "mxfp4", "bf16"),
    [("gpt-oss-20b", 3_708_089_088, 7_216_620_288), ("gpt-oss-120b", 5_002_907_904, 10_265_704_704)],
)
def test_weight_bytes_of_a_decode_step_of_batch_1(name, mxfp4, bf16):
    config = preset(name)
    for experts, size in (("mxfp4", mxfp4), ("bf16", bf16)):
        assert total(forward_parts(config, decode(1), Precision(experts=experts)), "weight_bytes") == size


def test_a_step_that_touches_every_expert_reads_the_file_but_for_the_embedding(config):
    precision = Precision(experts="mxfp4")
    rows = 100_000
    read = total(forward_parts(config, prefill(1, batch=rows), precision), "weight_bytes")
    embedding = (rows - config.vocab_size) * config.hidden_size * 2     # its rows are read in place of the table
    assert read == pytest.approx(weight_bytes_per_gpu(config, precision) + embedding, rel=1e-12)


def test_batch_32_of_120b_reads_74_gb_of_experts_in_fp8_and_39_in_mxfp4(b120):
    """The quoted figures are the experts of about 82 of 128; the dense weights add the same 3.2 GB to both."""
    assert round(expected_distinct_experts(b120, 32)) == 82
    for experts, quoted, tolerance in (("fp8", 74e9, 1e9), ("mxfp4", 39e9, 0.5e9)):
        parts = _parts(b120, decode(1, batch=32), Precision(experts=experts))
        routed = parts["experts_gate_up"].weight_bytes + parts["experts_down"].weight_bytes
        assert routed == pytest.approx(quoted, abs=tolerance)
        assert total(parts.values(), "weight_bytes") - routed == pytest.approx(3.097e9, abs=1e6)


@pytest.mark.parametrize(
    ("weight_format", "shape", "size"),
    [("bf16", (3, 5), 30), ("fp8", (2880, 2880), 2880 * 2880 + 4 * 23 * 23), ("fp8", (129, 128), 129 * 128 + 8),
     ("mxfp4", (5760, 2880), 8_294_400 + 518_400), ("mxfp4", (2880, 768), 2880 * 768 * 17 // 32)],
)
def test_matrix_bytes(weight_format, shape, size):
    assert matrix_bytes(weight_format, *shape) == size


# -- FLOPs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "giga"), [("gpt-oss-20b", 7.21), ("gpt-oss-120b", 10.26)])
def test_matmul_flop_per_token(name, giga):
    parts = _parts(preset(name), decode(1))
    products = sum(part.flop for part in parts.values() if not part.name.startswith("attention_"))
    assert round(products / 1e9, 2) == giga


def test_matmul_flop_are_twice_the_weights_a_token_meets_in_the_file():
    config = ModelConfig.load(TINY / "hf")
    dense = sum(np.prod(shape) for name, (_, shape, _) in _tiny_tensors().items()
                if name.endswith(("_proj.weight", "router.weight", "lm_head.weight")))
    blocks = sum(2 * np.prod(shape) for name, (_, shape, _) in _tiny_tensors().items() if name.endswith("_blocks"))
    parts = _parts(config, decode(1))
    products = sum(part.flop for part in parts.values() if not part.name.startswith("attention_"))
    assert products == 2 * (dense + blocks * config.experts_per_token / config.num_experts)


@given(new=st.integers(1, 40), cached=st.integers(0, 40), window=st.integers(1, 20))
def test_attention_pairs_are_those_the_mask_keeps(new, cached, window):
    query = np.arange(cached, cached + new)[:, None]
    key = np.arange(cached + new)[None, :]
    work = prefill(new, cached_tokens=cached)
    assert full_pairs(work) == (key <= query).sum()
    assert window_pairs(work, window) == ((key <= query) & (query - key < window)).sum()


def test_attention_flop_of_a_short_prompt_by_hand(b20):
    parts = _parts(b20, prefill(200))
    assert parts["attention_full"].flop == 12 * 4 * 64 * 64 * (200 * 201 // 2)
    assert parts["attention_window"].flop == 12 * 4 * 64 * 64 * (128 * 129 // 2 + 72 * 128)


@pytest.mark.parametrize("context", [1, 127, 128, 129, 8192])
def test_kv_bytes_of_a_decode_step(config, context):
    """Read all but the last position, write that one: per layer what the layer keeps, 2048 bytes a position in bf16."""
    parts = _parts(config, decode(context, batch=3))
    half = config.num_layers // 2
    assert parts["attention_full"].kv_bytes == 3 * half * 2048 * context
    assert parts["attention_window"].kv_bytes == 3 * half * 2048 * min(context, 128)
    eight = _parts(config, decode(context, batch=3), Precision(kv="fp8"))
    assert eight["attention_full"].kv_bytes * 2 == parts["attention_full"].kv_bytes


def test_a_prefill_writes_its_kv_once_and_of_a_window_only_what_is_kept(b20):
    parts = _parts(b20, prefill(1000))
    assert parts["attention_full"].kv_bytes == 12 * 2048 * 1000
    assert parts["attention_window"].kv_bytes == 12 * 2048 * 128
    later = _parts(b20, prefill(1000, cached_tokens=500))
    assert later["attention_full"].kv_bytes == 12 * 2048 * 1500
    assert later["attention_window"].kv_bytes == 12 * 2048 * (127 + 128)


def test_a_sequence_may_be_as_long_as_the_model_allows(b20):
    assert _parts(b20, decode(131_072))["attention_full"].kv_bytes == 12 * 2048 * 131_072


def test_a_verification_is_a_decode_step_with_more_rows(config):
    assert forward_parts(config, verify(500, 0, batch=2)) == forward_parts(config, decode(500, batch=2))
    one, five = _parts(config, decode(500)), _parts(config, verify(500, 4))
    assert five["head"].flop == 5 * one["head"].flop and five["head"].weight_bytes == one["head"].weight_bytes
    assert five["attention_full"].kv_bytes == one["attention_full"].kv_bytes / 500 * 504


# -- experts ----------------------------------------------------------------------------------------------------------
def test_expected_distinct_experts_of_8_tokens_of_20b(b20):
    assert expected_distinct_experts(b20, 8) == pytest.approx(21.0045, abs=5e-5)
    assert [expected_distinct_experts(b20, n) for n in (0, 1)] == [0, 4]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_expected_distinct_experts_by_enumeration(tokens):
    config = ModelConfig.load(TINY / "hf")              # 8 experts, 4 per token: 70 choices a token
    choices = list(itertools.combinations(range(config.num_experts), config.experts_per_token))
    sizes = [len(set().union(*picked)) for picked in itertools.product(choices, repeat=tokens)]
    assert expected_distinct_experts(config, tokens) == pytest.approx(np.mean(sizes), rel=1e-12)


# -- input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: prefill(0), "new_tokens is 0"),
        (lambda c: prefill(8, batch=0), "sequences is 0"),
        (lambda c: prefill(8.5), "new_tokens is 8.5"),
        (lambda c: prefill(8, cached_tokens=-1), "cached_tokens is -1"),
        (lambda c: decode(0), "context_tokens is 0"),
        (lambda c: verify(8, -1), "draft_tokens is -1"),
        (lambda c: expected_distinct_experts(c, -1), "tokens is -1"),
        (lambda c: forward_parts(c, prefill(131073)), "131073 tokens exceed the 131072 positions"),
        (lambda c: forward_parts(c, decode(8), plan=Plan(1, 1, 3)), "tp 3 does not divide the 64 query heads"),
        (lambda c: forward_parts(c, decode(8), plan=Plan(64, 1, 64)), "ep 64 exceeds the 32 experts"),
        (lambda c: Precision(experts="fp4"), "experts is 'fp4'; one of mxfp4, fp8, bf16"),
        (lambda c: Precision(dense="mxfp4"), "dense is 'mxfp4'"),
        (lambda c: Precision(kv="int8"), "kv is 'int8'"),
        (lambda c: matrix_bytes("int4", 2, 2), "weight format is 'int4'"),
    ],
)
def test_bad_input_is_named(b20, call, message):
    with pytest.raises(CostError, match=message):
        call(b20)


@settings(max_examples=50)
@given(tokens=st.integers(1, 500), cached=st.integers(0, 500), batch=st.integers(1, 9))
def test_every_quantity_of_every_part_is_finite_and_not_negative(tokens, cached, batch):
    for part in forward_parts(preset("nano"), prefill(tokens, batch, cached), plan=Plan(2, 2, 2)):
        numbers = (part.flop, part.weight_bytes, part.kv_bytes, part.activation_bytes, part.link_bytes)
        assert all(np.isfinite(x) and x >= 0 for x in numbers), part


def test_the_cost_model_runs_without_torch():
    program = "import sys, gptoss_lab.cost, gptoss_lab.cost.published, gptoss_lab.cost.speculation, " \
              "gptoss_lab.cost.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
