"""Bounds: the datasheet limits, the arithmetic of parts and wholes, what must hold for any plan, batch and length."""
from itertools import pairwise

import pytest
from cost_strategies import models, plans, precisions
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import (
    FP8_EXPERTS,
    H200,
    H200_MEASURED,
    SERVED,
    CostError,
    Hardware,
    Part,
    Plan,
    Precision,
    all_plans,
    bound,
    decode,
    decode_bound,
    forward_parts,
    prefill,
    prefill_bound,
    total,
)
from gptoss_lab.cost.plan import largest_slice, shares
from gptoss_lab.results import read_rows, recorded_folder

LIMITS_S = [
    ("gpt-oss-120b", 8192, 0.048), ("gpt-oss-120b", 32768, 0.312), ("gpt-oss-120b", 65536, 0.944),
    ("gpt-oss-120b", 128000, 3.04), ("gpt-oss-20b", 8192, 0.032), ("gpt-oss-20b", 32768, 0.208),
    ("gpt-oss-20b", 65536, 0.629), ("gpt-oss-20b", 128000, 2.02),
]


@pytest.mark.parametrize(("name", "tokens", "limit_s"), LIMITS_S)
def test_datasheet_limits_of_prefill(name, tokens, limit_s):
    """Experts and projections at the FP8 rate, attention at the bf16 rate, one row of logits. The quoted limits count
    the router at the FP8 rate too; kept in bf16, as released, it adds at most a quarter of a per cent."""
    limit = prefill_bound(preset(name), tokens, precision=SERVED)
    router = limit["router"].part.flop
    quoted = limit.compute_seconds - router / 989e12 + router / 1979e12
    assert round(quoted, 3 if limit_s < 1 else 2) == limit_s
    assert limit.seconds == limit.compute_seconds == pytest.approx(quoted, rel=0.0025)
    assert limit.seconds <= limit.sequential_seconds <= 1.01 * limit.seconds


def test_projections_in_bf16_cost_the_difference_of_the_rates(b120):
    served, released = (prefill_bound(b120, 8192, precision=p) for p in (SERVED, FP8_EXPERTS))
    flop = 2 * 8192 * 36 * 2880 * (5120 + 4096)
    assert released.seconds - served.seconds == pytest.approx(flop / 989e12 - flop / 1979e12, rel=1e-9)


def test_bound_of_a_part_is_the_largest_of_its_three_times():
    toy = Hardware("toy", 1e9, 100.0, 10.0, 20.0, 50.0)
    parts = [Part("reads", weight_bytes=300, kv_bytes=100, flop=10),
             Part("multiplies", "fp8", flop=100, weight_bytes=100), Part("sends", link_bytes=250)]
    limit = bound(parts, toy)
    assert [b.seconds for b in limit.parts] == [4, 5, 5]
    assert [b.limited_by for b in limit.parts] == ["memory", "compute", "link"]
    assert (limit.memory_seconds, limit.compute_seconds, limit.link_seconds) == (5, 6, 5)
    assert (limit.seconds, limit.limited_by, limit.sequential_seconds) == (6, "compute", 14)
    assert [row["share"] for row in limit.table()] == [4 / 14, 5 / 14, 5 / 14]
    with pytest.raises(KeyError, match="reads, multiplies, sends"):
        limit["waits"]


def test_decode_is_limited_by_memory_and_equals_bytes_over_bandwidth(config):
    limit = decode_bound(config, 8192, batch=32)
    assert limit.limited_by == "memory"
    assert limit.seconds == pytest.approx(total(forward_parts(config, decode(8192, 32)), "memory_bytes") / 4.8e12)


def test_measured_ceilings_never_promise_more_than_the_datasheet():
    for name in Hardware.numbers():
        assert getattr(H200_MEASURED, name) <= getattr(H200, name)
    assert {row["mark"] for row in H200.table()} == {"published"}
    assert {row["mark"] for row in H200_MEASURED.table()} == {"published", "recorded"}
    assert all(row["source"] for row in H200.table() + H200_MEASURED.table())


def test_measured_ceilings_are_those_of_the_rows():
    rows = {row["case"]: row["value"] for row in read_rows(recorded_folder(), suite="profile")
            if row["case"].startswith("ceiling: ")}
    for case, value, unit in (("device copy", H200_MEASURED.memory_bytes_per_second, 1e9),
                              ("bf16 product", H200_MEASURED.bf16_flop_per_second, 1e12),
                              ("fp8 product, rowwise scales", H200_MEASURED.fp8_flop_per_second, 1e12)):
        assert value / unit == pytest.approx(rows[f"ceiling: {case}"], abs=0.5)


# -- plans ------------------------------------------------------------------------------------------------------------
def test_expert_slices_are_the_ones_cut_at_multiples_of_128():
    assert [largest_slice(2880, ways) for ways in (1, 2, 4, 8)] == [2880, 1472, 768, 384]
    assert [largest_slice(288, ways) for ways in (1, 2, 4, 8)] == [288, 160, 128, 128]


@given(length=st.integers(1, 5000), ways=st.integers(1, 16))
def test_largest_slice_is_the_best_of_all_even_cuts(length, ways):
    cuts = []
    for step in range(0, length + 128, 128):
        edges = [min(length, n * step) for n in range(ways)] + [length]
        cuts.append(max(b - a for a, b in pairwise(edges)))
    assert largest_slice(length, ways) == min(cuts)


def test_shares_of_the_plans_of_the_post(b120):
    four = shares(b120, Plan(ep=4, dp=1, tp=4))
    assert (four.heads, four.kv_heads, four.experts, four.expert_rows, four.vocab_rows) == (16, 2, 32, 2880, 50272)
    one = shares(b120, Plan(ep=1, dp=1, tp=4))
    assert (one.experts, one.expert_rows) == (128, 768)
    assert shares(preset("nano"), Plan(1, 1, 4)).kv_heads == 1      # two KV heads: repeated


def test_all_plans_of_a_node():
    assert [str(p) for p in all_plans(2)] == ["EP1 DP1 TP2", "EP1 DP2 TP1", "EP2 DP1 TP2", "EP2 DP2 TP1"]
    assert len(all_plans(8)) == 16
    with pytest.raises(CostError, match="ep 4 does not divide the 2 GPUs"):
        Plan(ep=4, dp=1, tp=2)
    with pytest.raises(CostError, match="tp is 0"):
        Plan(tp=0)


def test_what_a_plan_divides(b20):
    """Sequences by dp (rounded up), heads by tp, whole experts by ep, whatever the other two are."""
    alone = {p.name: p for p in forward_parts(b20, decode(500, 5))}
    dp = {p.name: p for p in forward_parts(b20, decode(500, 5), plan=Plan(1, 4, 1))}
    assert dp["attention_full"].kv_bytes == alone["attention_full"].kv_bytes * 2 / 5
    assert dp["attention_full"].flop == alone["attention_full"].flop * 2 / 5
    assert dp["qkv_projection"].flop == alone["qkv_projection"].flop * 2 / 5
    assert dp["qkv_projection"].weight_bytes == alone["qkv_projection"].weight_bytes
    assert dp["router"] == alone["router"]
    tp = {p.name: p for p in forward_parts(b20, decode(500, 5), plan=Plan(4, 1, 4))}
    for name in ("attention_full", "attention_window"):
        assert tp[name].kv_bytes == alone[name].kv_bytes / 4 and tp[name].flop == alone[name].flop / 4
    for plan in (Plan(4, 1, 4), Plan(4, 4, 1), Plan(4, 2, 2)):
        ep = {p.name: p for p in forward_parts(b20, decode(500, 5), plan=plan)}
        for name in ("experts_gate_up", "experts_down"):
            assert ep[name].weight_bytes == pytest.approx(alone[name].weight_bytes / 4)
            assert ep[name].flop == alone[name].flop / 4
    sliced = {p.name: p for p in forward_parts(b20, decode(500, 5), plan=Plan(1, 1, 4))}
    assert sliced["experts_down"].flop == alone["experts_down"].flop * 768 / 2880


def test_one_gpu_sends_nothing(config):
    assert total(forward_parts(config, decode(64, 8)), "link_bytes") == 0


def test_link_bytes_by_hand(b20):
    """A ring of p ranks moves 2 (p-1) chunks of N/p through each; dispatch brings the rows of the other groups."""
    rows = 2880 * 2
    parts = {p.name: p.link_bytes for p in forward_parts(b20, decode(64, 8), plan=Plan(4, 1, 4))}
    assert parts["embedding_all_reduce"] == 6 * 8 * rows / 4
    assert parts["attention_all_reduce"] == parts["combine"] == 24 * 6 * 8 * rows / 4
    assert parts["dispatch"] == 0
    spread = {p.name: p.link_bytes for p in forward_parts(b20, decode(64, 8), plan=Plan(4, 4, 1))}
    assert spread["dispatch"] == spread["combine"] == 24 * 6 * rows     # six of eight rows arrive, and leave as sums
    assert spread["attention_all_reduce"] == 0
    odd = {p.name: p.link_bytes for p in forward_parts(b20, decode(64, 1), plan=Plan(4, 4, 1))}
    assert odd["dispatch"] == 24 * rows                                 # the groups without a sequence wait for it


# -- properties -------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(config=models(), precision=precisions(), plan=plans(), batch=st.integers(1, 128), length=st.integers(1, 65536),
       decoding=st.booleans())
def test_more_gpus_never_need_less_than_their_share(config, precision, plan, batch, length, decoding):
    """Every part, and so the whole: bytes and FLOPs of the fullest GPU are at least 1/world of those of one GPU."""
    work = decode(length, batch) if decoding else prefill(length, batch)
    alone = forward_parts(config, work, precision)
    spread = forward_parts(config, work, precision, plan)
    for one, share in zip(alone, spread, strict=True):
        for quantity in ("weight_bytes", "kv_bytes", "flop"):
            assert getattr(share, quantity) * plan.world >= getattr(one, quantity) * (1 - 1e-12), one.name
            assert getattr(share, quantity) <= getattr(one, quantity) * (1 + 1e-12), one.name


@settings(max_examples=200, deadline=None)
@given(config=models(), precision=precisions(), plan=plans(), batch=st.integers(1, 127), length=st.integers(1, 65536),
       longer=st.integers(1, 65536), more=st.integers(1, 64))
def test_bounds_grow_with_batch_and_length(config, precision, plan, batch, length, longer, more):
    for make in (decode_bound, prefill_bound):
        base = make(config, length, batch, precision, plan)
        for bigger in (make(config, length, batch + more, precision, plan),
                       make(config, length + longer, batch, precision, plan)):
            assert bigger.seconds >= base.seconds * (1 - 1e-12)
            assert bigger.sequential_seconds >= base.sequential_seconds * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(config=models(), precision=precisions(), plan=plans(), batch=st.integers(1, 128), length=st.integers(1, 131072))
def test_a_whole_lies_between_its_largest_part_and_the_sum_of_its_parts(config, precision, plan, batch, length):
    limit = decode_bound(config, length, batch, precision, plan)
    assert max(b.seconds for b in limit.parts) <= limit.seconds * (1 + 1e-12)
    assert limit.seconds <= limit.sequential_seconds * (1 + 1e-12)


@settings(max_examples=50, deadline=None)
@given(config=models(), cut=st.integers(1, 4095))
def test_two_chunks_do_the_flop_of_one_prefill(config, cut):
    """Chunking changes bytes (weights read twice), never the layers' FLOPs; the head runs once per chunk."""
    whole = forward_parts(config, prefill(4096))
    first, second = forward_parts(config, prefill(cut)), forward_parts(config, prefill(4096 - cut, cached_tokens=cut))
    for part, a, b in zip(whole, first, second, strict=True):
        assert a.flop + b.flop == (2 if part.name == "head" else 1) * part.flop
        assert a.weight_bytes + b.weight_bytes >= part.weight_bytes


@pytest.mark.parametrize("number", Hardware.numbers())
def test_impossible_hardware_is_refused(number):
    values = {name: 1.0 for name in Hardware.numbers()}
    with pytest.raises(CostError, match=number):
        Hardware("x", **{**values, number: 0.0})
    with pytest.raises(CostError, match="unit is 'fp4'"):
        Hardware("x", **values).flop_per_second("fp4")


def test_a_unit_per_format():
    units = {e: Precision(experts=e).expert_unit for e in ("mxfp4", "fp8", "bf16")}
    assert units == {"mxfp4": "bf16", "fp8": "fp8", "bf16": "bf16"}
    assert Precision(experts="mxfp4", mxfp4_unit="fp8").expert_unit == "fp8"
