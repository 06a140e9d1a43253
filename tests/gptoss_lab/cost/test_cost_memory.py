"""KV bytes of both kinds of engine, and what fits."""
import pytest
from cost_strategies import models, plans, precisions
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.cost import (
    RELEASED,
    CostError,
    Plan,
    Precision,
    kv_bytes,
    kv_bytes_per_gpu,
    max_sequences,
    memory_fit,
    weight_bytes_per_gpu,
)
from gptoss_lab.cost.memory import RESERVED_BYTES


@pytest.mark.parametrize(
    ("tokens", "size"), [(0, 0), (1, 73_728), (128, 9_437_184), (129, 9_474_048), (131_072, 4_836_556_800)]
)
def test_kv_bytes_of_120b_with_window_rings(b120, tokens, size):
    assert kv_bytes(b120, tokens) == size


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 73_728), (128, 9_437_184), (129, 9_510_912), (131_072, 9_663_676_416)]
)
def test_kv_bytes_of_120b_at_full_length_in_all_layers(b120, tokens, size):
    assert kv_bytes(b120, tokens, window_ring=False) == size


def test_kv_bytes_of_20b_and_in_fp8(b20):
    assert kv_bytes(b20, 131_072) == 24_576 * 131_072 + 3_145_728
    assert kv_bytes(b20, 131_072, kv="fp8") * 2 == kv_bytes(b20, 131_072)
    assert kv_bytes(b20, 8192, window_ring=False) == 49_152 * 8192


def test_kv_is_spread_over_heads_and_sequences(b120):
    one = kv_bytes(b120, 8192)
    assert kv_bytes_per_gpu(b120, 8192, 8, plan=Plan(1, 1, 4)) == 8 * one // 4
    assert kv_bytes_per_gpu(b120, 8192, 8, plan=Plan(1, 4, 1)) == 2 * one
    assert kv_bytes_per_gpu(b120, 8192, 5, plan=Plan(1, 4, 1)) == 2 * one           # 2, 1, 1, 1
    assert kv_bytes_per_gpu(b120, 8192, 1, plan=Plan(1, 1, 16)) == one // 8         # eight KV heads, repeated


def test_what_fits_on_one_h200(b20, b120):
    assert not memory_fit(b120, 1, precision=Precision(experts="bf16")).fits
    assert max_sequences(b120, 8192, Precision(experts="bf16")) == 0
    fp8 = memory_fit(b120, 8192, 32)
    assert fp8.fits and fp8.weight_bytes == 119_025_355_392 and fp8.kv_bytes == 32 * (36_864 * 8192 + 4_718_592)
    assert fp8.free_bytes == 141e9 - fp8.weight_bytes - fp8.kv_bytes - RESERVED_BYTES
    assert not memory_fit(b120, 8192, 128).fits
    assert memory_fit(b120, 8192, 128, RELEASED).fits
    assert memory_fit(b20, 8192, 128).fits
    assert fp8.reason == "weights 119.0 + KV 9.8 + reserve 4.3 GB fits in 141.0 GB"
    assert "does not fit" in memory_fit(b120, 8192, 128).reason


@settings(max_examples=100, deadline=None)
@given(config=models(), precision=precisions(), plan=plans(), tokens=st.integers(1, 131072), ring=st.booleans())
def test_max_sequences_is_the_last_that_fits(config, precision, plan, tokens, ring):
    most = max_sequences(config, tokens, precision, plan, window_ring=ring)
    fits = [memory_fit(config, tokens, n, precision, plan, window_ring=ring).fits for n in (most, most + 1)]
    weights_fit = memory_fit(config, 0, 0, precision, plan).fits
    assert fits == [weights_fit, False]


@settings(max_examples=100, deadline=None)
@given(config=models(), precision=precisions(), plan=plans())
def test_weights_of_a_gpu_are_at_least_the_share_and_at_most_all(config, precision, plan):
    alone = weight_bytes_per_gpu(config, precision)
    assert alone / plan.world <= weight_bytes_per_gpu(config, precision, plan) <= alone


@settings(max_examples=50)
@given(config=models(), tokens=st.integers(0, 131071), ring=st.booleans())
def test_kv_grows_with_length_and_a_ring_never_takes_more(config, tokens, ring):
    assert kv_bytes(config, tokens, window_ring=ring) < kv_bytes(config, tokens + 1, window_ring=ring)
    assert kv_bytes(config, tokens) <= kv_bytes(config, tokens, window_ring=False)


def test_bad_input_is_named(b20):
    with pytest.raises(CostError, match="131073 tokens exceed"):
        kv_bytes(b20, 131_073)
    with pytest.raises(CostError, match="KV format is 'int4'"):
        kv_bytes(b20, 8, kv="int4")
    with pytest.raises(CostError, match="tokens is -1"):
        kv_bytes(b20, -1)
    with pytest.raises(CostError, match="reserved_bytes is -5"):
        memory_fit(b20, 8, reserved_bytes=-5)
