"""The numbers behind the figures, against closed forms and hand-made cases."""
import math

import pytest
import torch

from gptoss_lab.checkpoint.manifest import count_parameters, manifest, total_bytes
from gptoss_lab.config import preset
from gptoss_lab.viz import activation, cache, exponents, hierarchy, recorded, routing, sinks, sizes, style, window, yarn
from gptoss_lab.viz.table import table

MODELS = ("gpt-oss-20b", "gpt-oss-120b", "nano")


# -- sizes and hierarchy -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", sizes.FORMATS)
def test_the_parts_are_the_whole_checkpoint(name, layout):
    config = preset(name)
    assert sum(sizes.byte_parts(config, layout).values()) == total_bytes(manifest(config, layout))


def test_parts_of_the_120b_by_hand():
    parts = sizes.byte_parts(preset("gpt-oss-120b"), "hf")
    assert parts["expert codes"] == 57_330_892_800 and parts["expert scales"] == 3_583_180_800
    assert parts["embedding, unembedding"] == 2 * 2 * 579_133_440
    assert parts["expert biases"] == 2 * 39_813_120
    assert sum(parts.values()) == 65_248_815_744


@pytest.mark.parametrize(("name", "count"), [("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)])
def test_the_map_holds_every_parameter(name, count):
    assert hierarchy.parameters(preset(name)) == count == count_parameters(preset(name))


def test_the_map_changes_with_the_config():
    names = {b.name: b for b in hierarchy.blocks(preset("gpt-oss-20b"))}
    assert names["QKV projection"].weights[0][1] == (5120, 2880)
    assert names["experts: gate and up"].weights[0][1] == (32, 5760, 2880)
    assert hierarchy.parameters(preset("nano")) == count_parameters(preset("nano"))


# -- exponents ---------------------------------------------------------------------------------------------------------
def test_a_block_is_cut_where_it_lies_and_the_last_one_is_smaller():
    scales = (torch.arange(300 * 9) % 200).to(torch.uint8).view(300, 9)
    assert torch.equal(exponents.block_exponents(scales, 1, 1), scales[128:256, 4:8].int() - 127)
    assert exponents.block_exponents(scales, 2, 2).shape == (44, 1)


@pytest.mark.parametrize("where", [(3, 0), (0, 3), (-1, 0)])
def test_a_block_that_does_not_exist_is_named(where):
    with pytest.raises(IndexError, match=f"block \\({where[0]}, {where[1]}\\) does not exist"):
        exponents.block_exponents(torch.zeros(300, 9, dtype=torch.uint8), *where)


def test_spreads_equal_a_loop_over_blocks():
    scales = torch.randint(90, 130, (2, 300, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = exponents.spreads(scales)
    assert found.shape == (2, 3, 3)
    for e in range(2):
        for i in range(3):
            for j in range(3):
                block = exponents.block_exponents(scales[e], i, j)
                assert found[e, i, j] == block.max() - block.min()


def test_spreads_of_a_conversion_are_added_up_over_its_tensors():
    found = [{"spreads": {"3": 2, "14": 1}}, None, {"spreads": {"3": 5}}]
    assert exponents.spread_counts([{}, *({"statistics": one} for one in found)]) == {3: 7, 14: 1}


def test_fifteen_exponents_are_exact_for_every_code_and_the_sixteenth_is_not():
    error = exponents.code_errors(range(21))
    assert error.shape == (7, 21)
    assert bool((error[:, : exponents.HELD] == 0).all())
    codes = [0.5, 1, 1.5, 2, 3, 4, 6]
    inexact = {codes[i] for i in range(7) if error[i, exponents.HELD] > 0}
    assert inexact == {0.5, 1.5}                      # 2^-10 and 1.5 * 2^-9; the others are multiples of 2^-9


def test_code_errors_agree_with_e4m3_written_out():
    """e4m3: multiples of 2^-9 below 2^-6, else three mantissa bits; nearest, ties to even."""
    for i, code in enumerate([0.5, 1, 1.5, 2, 3, 4, 6]):
        for d in range(21):
            value = code * 2.0 ** (6 - d)
            step = 2.0 ** (max(math.floor(math.log2(value)), -6) - 3)
            nearest = round(value / step) * step      # Python rounds halves to even
            found = exponents.code_errors(range(21))[i, d].item()
            assert found == pytest.approx(abs(nearest - value) / value, abs=1e-12)


# -- yarn --------------------------------------------------------------------------------------------------------------
def test_rounding_the_ramp_moves_pairs_9_to_17_only():
    error = yarn.rounding_error(preset("gpt-oss-20b").rope, 64)
    assert [i for i, e in enumerate(error.tolist()) if abs(e) > 1e-9] == list(range(9, 18))
    wanted = [-0.3, 0.6, 1.7, 3.3, 5.4, 8.8, 14.6, 27.3, 76.3]
    assert error[9:18].tolist() == pytest.approx(wanted, abs=0.06)


def test_frequencies_are_the_published_ones():
    omega = yarn.frequencies(preset("gpt-oss-20b").rope, 64, truncate=False)
    for pair, value in {8: 5.081327482e-02, 12: 6.794959490e-03, 17: 1.293187012e-04, 31: 3.023511428e-07}.items():
        assert omega[pair].item() == pytest.approx(value, rel=1e-8)


# -- sinks -------------------------------------------------------------------------------------------------------------
def test_a_sink_of_2_on_four_logits():
    weights, share = sinks.softmax_with_sink(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2.0)
    values = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64)
    assert float(weights @ values) == pytest.approx(32.126854, abs=1e-6)
    assert share + float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert share == pytest.approx(float(weights[1]), abs=1e-12)          # equal logits, equal shares


def test_without_a_sink_it_is_the_softmax():
    logits = torch.tensor([0.3, -2.0, 5.0], dtype=torch.float64)
    weights, share = sinks.softmax_with_sink(logits, -math.inf)
    assert torch.equal(weights, torch.softmax(logits, 0)) and share == 0


# -- routing -----------------------------------------------------------------------------------------------------------
IDS = torch.tensor([[[0, 1], [1, 2]], [[3, 0], [3, 1]]])                 # 2 layers, 2 tokens, 2 of 4 experts


def test_counts_and_touched_by_hand():
    assert routing.expert_counts(IDS, 4).tolist() == [[1, 2, 1, 0], [1, 1, 0, 2]]
    assert routing.experts_touched(IDS).tolist() == [3, 3]


def test_an_id_outside_the_experts_is_refused():
    with pytest.raises(ValueError, match="0 to 3; 0..2 are expected"):
        routing.expert_counts(IDS, 3)


def test_expected_experts_agree_with_drawing_them():
    g = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 32, 16, generator=g).topk(4, dim=-1).indices  # 4000 batches of 32 tokens
    mean = torch.tensor([d.unique().numel() for d in draws]).double().mean()
    assert routing.expected_touched(32, 16, 4) == pytest.approx(float(mean), abs=0.01)
    assert routing.expected_touched(1, 128, 4) == pytest.approx(4)
    assert routing.expected_touched(32, 128, 4) == pytest.approx(81.6, abs=0.1)


# -- recorded ----------------------------------------------------------------------------------------------------------
def row(**changes):
    base = {"suite": "prefill", "case": "c", "backend": "b", "metric": "seconds", "value": 2.0, "unit": "s",
            "bound": 0.5, "conditions": {"tokens": 8192}, "gpu": "NVIDIA H200", "date": "2026-01-02"}
    return {**base, **changes}


def test_a_table_names_origin_machine_and_share_of_the_bound():
    line = recorded.result_table([row()]).frame.iloc[0]
    assert (line["origin"], line["machine"]) == ("recorded", "NVIDIA H200")
    assert (line["% of bound"], line["value"]) == ("25", "2")
    assert line["conditions"] == "tokens 8192"


def test_a_rate_is_measured_the_other_way_round_and_a_failure_says_why():
    assert recorded.share_of_bound("tflops", 400.0, 800.0) == "50"
    assert recorded.share_of_bound("tflops", 400.0, None) == ""
    failed = row(value=None, gpu=None, conditions={"failed": "out of memory"})
    line = recorded.result_table([failed]).frame.iloc[0]
    assert line["value"] == "failed: out of memory" and line["machine"] == "CPU" and line["% of bound"] == ""


def test_no_rows_give_an_empty_table_with_its_columns():
    empty = recorded.result_table([]).frame
    assert tuple(empty.columns) == recorded.COLUMNS and len(empty) == 0


# -- table -------------------------------------------------------------------------------------------------------------
def test_a_table_shows_long_cells_whole_and_escapes_them():
    shown = table([["a <b>" + "x" * 200, 1234567, "1.88"]], ["what", "count", "ratio"])
    page = shown._repr_html_()
    assert "a &lt;b&gt;" + "x" * 200 in page and "..." not in page
    assert '<td style="text-align:right">1,234,567</td>' in page and '<td style="text-align:right">1.88</td>' in page
    assert '<td style="text-align:left">a &lt;' in page and "x" * 200 in str(shown)


# -- style -------------------------------------------------------------------------------------------------------------
def test_binary_units():
    assert [style.binary(n) for n in (12, 2048, 65_248_815_744)] == ["12 B", "2.0 KiB", "60.8 GiB"]


def test_an_unknown_origin_is_refused():
    with pytest.raises(ValueError, match="'guessed'"):
        style.mark("guessed", "x")


# -- activation, window, cache -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gate", "up", "h"), [
    (1, 0, 0.8457957659328212), (20, 20, 55.99962502642654), (-20, -20, 1.976e-13), (0.5, -1, 0),
    (-3, 2, -0.05421392912335791),
])
def test_the_curve_has_the_known_values(gate, up, h):
    found = activation.curve(preset("nano"), torch.tensor([float(gate)]), float(up))
    assert float(found[0]) == pytest.approx(h, rel=1e-3, abs=1e-15)


def test_a_window_counts_the_query_itself():
    seen = window.visible(300, 128)
    assert int(seen[299].sum()) == 128 and bool(seen[299, 172]) and not bool(seen[299, 171])
    assert int(seen[5].sum()) == 6 and bool(seen.diagonal().all())
    assert torch.equal(window.visible(50, None), torch.ones(50, 50).tril().bool())


def test_the_mask_is_the_one_that_attention_uses():
    """Where V is one-hot per key, the output of the reference attention is the weight row itself."""
    from gptoss_kernels.reference.attention import sink_attention

    t, w = 20, 5
    q = torch.randn(t, 1, t, generator=torch.Generator().manual_seed(0))
    out, _ = sink_attention(q, q, torch.eye(t)[:, None, :], None, cu_seqlens_q=[0, t], cu_seqlens_k=[0, t], window=w)
    assert torch.equal(out[:, 0, :] > 0, window.visible(t, w))


def test_without_a_window_every_layer_keeps_everything():
    assert cache.without_window(preset("gpt-oss-120b"), 131_072) == 9_663_676_416
    assert cache.without_window(preset("gpt-oss-20b"), 1) == 49_152
