"""The attention benchmark's arithmetic and its tables; the timings themselves need a GPU."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_lab.bench import attention, attention_peers


@given(st.integers(1, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_visible_pairs_counts_the_mask(q_len, past, window):
    kv_len = q_len + past
    query, key = torch.arange(past, kv_len)[:, None], torch.arange(kv_len)[None, :]
    seen = (key <= query) & (key > query - (window or kv_len))
    assert attention.visible_pairs(q_len, kv_len, window) == int(seen.sum())


def test_work_and_bound_of_known_cases():
    full = attention.Case("prefill", 8192, 8192)
    assert full.flops() == 4 * 64 * 64 * 8192 * 8193 / 2
    assert full.bound_seconds() == pytest.approx(555.9e-6, rel=1e-3)            # FLOPs over 989 TFLOP/s
    decode = attention.Case("decode", 1, 8192, None, 16)
    assert decode.bytes() == 16 * (8192 * 8 * 64 * 2 * 2 + 2 * 64 * 64 * 2)
    assert decode.bound_seconds() == pytest.approx(decode.bytes() / 4.8e12)     # bytes over 4.8 TB/s
    sliding = attention.Case("decode", 1, 8192, 128)
    assert sliding.bytes() == 128 * 8 * 64 * 2 * 2 + 2 * 64 * 64 * 2


def test_every_case_has_its_own_name():
    names = [case.name for case in attention.CASES]
    assert len(set(names)) == len(names) and "decode/window128/8192/batch16" in names


@pytest.mark.parametrize(("name", "peer"), [
    ("auto (gluon)", "flashinfer-fa3 AttentionSink"), ("flashinfer-fa3", "flashinfer-fa3 AttentionSink"),
    ("gluon without sinks", "gluon"), ("flashinfer-fa3 without sinks", "flashinfer-fa3"),
    ("flashinfer-fa3 AttentionSink", None),
])
def test_prefill_rows_are_set_beside_the_ready_made_variant(name, peer):
    readings = dict.fromkeys(["auto (gluon)", "gluon", "gluon without sinks", "flashinfer-fa3",
                              "flashinfer-fa3 AttentionSink", "flashinfer-fa3 without sinks"])
    assert attention_peers.peer_of(name, readings) == peer


def test_decode_rows_are_set_beside_xqa():
    readings = dict.fromkeys(["auto (xqa)", "xqa", "xqa without sinks", "triton", "flashinfer-fa2"])
    assert attention_peers.peer_of("triton", readings) == "xqa"
    assert attention_peers.peer_of("xqa", readings) == "xqa without sinks"
    assert attention_peers.peer_of("xqa without sinks", readings) == "xqa"


def test_rows_carry_rate_bound_and_peer():
    case = attention.Case("prefill", 8192, 8192)
    rows = attention._rows(case, {"triton": [0.001, 0.002, 0.003], "flashinfer-fa3 AttentionSink": [0.001] * 3}, None)
    time_row, rate = rows[0], rows[1]
    assert (time_row["metric"], time_row["value"], time_row["unit"]) == ("microseconds", 2000.0, "us")
    assert rate["metric"] == "tflops" and rate["value"] == pytest.approx(case.flops() / 0.002 / 1e12)
    assert rate["bound"] == pytest.approx(989) and rate["peer"]["name"] == "flashinfer-fa3 AttentionSink"
    text = attention.table([*rows, attention._missing_row(case, "xqa", "not here")])
    assert "0.500" in text and "27.8%" in text and "not here" in text


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        attention.run()
