"""The bias in three places, the narrow accumulator, the fused epilogue, the CUDA excerpts, bytes of decode."""
import pytest
import torch

from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.quant import dequantise_groups
from gptoss_lab.config import preset
from gptoss_lab.viz import moe_bias, moe_decode, moe_epilogue, moe_promotion, moe_sources

PRODUCT = moe_promotion.example(rows=8, n=200, k=352, seed=4)      # the last block of K and of the columns is short


def test_the_promoted_sum_is_the_product_with_its_bias():
    exact = PRODUCT.exact()
    dense = PRODUCT.a.double() * PRODUCT.a_scale.double().repeat_interleave(128, 1)[:, :352]
    blocks = PRODUCT.w_scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :352]
    assert torch.allclose(exact, dense @ (PRODUCT.w.double() * blocks).T + PRODUCT.bias, rtol=1e-12, atol=1e-12)
    for place in moe_promotion.PLACES:
        assert moe_promotion.relative_error(moe_promotion.accumulate(PRODUCT, place), exact) < 3e-7
    bare = moe_promotion.accumulate(PRODUCT, None)
    assert moe_promotion.relative_error(bare, exact - PRODUCT.bias) < 3e-7


def test_cutting_to_bits():
    x = torch.tensor([1.0, -1.75, 3.0, 1 / 3, 0.0, -(2.0**-80)], dtype=torch.float64)
    assert moe_promotion.keep(x, 1).tolist() == [1.0, -1.0, 2.0, 0.25, 0.0, -(2.0**-80)]
    assert moe_promotion.keep(x, 2).tolist()[:4] == [1.0, -1.5, 3.0, 0.25]
    assert torch.equal(moe_promotion.keep(x, None), x) and torch.equal(moe_promotion.keep(x, 53), x)
    fp32 = torch.randn(100).double()
    assert torch.equal(moe_promotion.keep(fp32, 24), fp32)


def test_a_narrow_accumulator_needs_promotion_and_the_bias_outside():
    p = moe_promotion.example(rows=16, n=128)
    exact = p.exact()
    at = {place: moe_promotion.relative_error(moe_promotion.accumulate(p, place, 14), exact)
          for place in moe_promotion.PLACES}
    assert 10 * at["tensor core"] < at["one accumulator"] and 1.2 * at["registers"] < at["tensor core"] < 2**-9
    finer = moe_promotion.relative_error(moe_promotion.accumulate(p, "registers", 16), exact)
    assert 3 < at["registers"] / finer < 6                              # two bits more, a quarter of the error


def test_start_values_times_scales_are_the_bias():
    starts = moe_promotion.start_values(PRODUCT, 150)
    back = starts * PRODUCT.a_scale[:, 0] * PRODUCT.w_scale[1, 0]
    assert torch.allclose(back, PRODUCT.bias[150].expand(8)) and starts.unique().numel() == 8


def test_costs_by_hand():
    second, columns, accumulator = moe_bias.costs(32768, 5760, 2880, 128)
    assert second.bytes == 4 * 128 * 5760 + 4 * 32768 * 5760 and second.flop == 0
    assert second.seconds == pytest.approx(second.bytes / 4.8e12)
    assert columns.flop == 2 * 32768 * 5760 * 128 and columns.share == pytest.approx(128 / 2880)
    assert accumulator.bytes == 4 * 128 * 5760
    assert second.share == pytest.approx(second.seconds / (2 * 32768 * 5760 * 2880 / 1979e12))


def test_errors_of_the_three_ways():
    small, large = moe_bias.errors(1 / 16), moe_bias.errors(16.0)
    assert 1.3 < small["second pass"] / small["accumulator"] < 1.5      # two roundings: the square root of two
    assert 2**-7 < large["1 extra column"] < 2**-4 and large["2 extra columns"] < 2**-9
    assert all(1.4e-3 < found["accumulator"] < 1.9e-3 for found in (small, large))


def test_the_reordered_rows_are_a_permutation_with_whole_results():
    places = [moe_epilogue.place_of(row, True) for row in range(32)]
    assert sorted(places) == list(range(32))
    assert [moe_epilogue.results_of(q, True) for q in range(4)] == [[4 * q + j for j in range(4)] for q in range(4)]
    assert moe_epilogue.results_of(1, False) == [1, 5, 9, 13]
    with pytest.raises(ValueError, match="row 32"):
        moe_epilogue.place_of(32, True)


def test_the_kernel_says_the_same_reordering():
    assert "8 q + 2 j + s comes to place 8 j + 2 q + s" in moe_sources.function("load_weights").replace("\n// ", " ")


def test_tiles_of_256_columns_are_whole_scale_groups():
    gate_up = 3 * torch.randn(5, 640, generator=torch.Generator().manual_seed(0))
    h = swiglu(gate_up)
    q, scale = moe_epilogue.requantise_by_tile(gate_up, 256)
    amax = torch.stack([h[:, :128].abs().amax(1), h[:, 128:256].abs().amax(1), h[:, 256:].abs().amax(1)], dim=1)
    assert torch.allclose(scale, amax / 448)
    error = (dequantise_groups(q.view(torch.float8_e4m3fn), scale) - h).abs()
    assert (error <= h.abs() * 2**-4 + scale.max() * 2**-10).all()
    assert moe_epilogue.requantise_by_tile(gate_up, 192)[1].shape == (5, 4)


def test_traffic():
    assert moe_epilogue.traffic(10, 2880) == {"separate": 4 * 10 * 5760 + 10 * (2880 + 92), "fused": 10 * (2880 + 92)}


def test_decode_bytes():
    frame = moe_decode.bytes_table(preset("gpt-oss-120b"), (1, 32)).frame
    weights = 36 * 4 * (3 * 2880 * 2880 + 4 * (45 * 23 + 23 * 23) + 2 * 3 * 2880)
    assert frame["FP8, GB"][0] == f"{weights / 1e9:.1f}" and frame["experts per layer"].tolist() == ["4.0", "81.7"]
    assert 0.52 < float(frame["ratio"][1]) < 0.54


@pytest.mark.parametrize("name", ["promote", "start_accumulators", "swiglu", "activate", "over_quad", "items_of"])
def test_an_excerpt_is_one_whole_function(name):
    text = moe_sources.function(name)
    assert text in moe_sources.source("grouped_gemm.cu") and text.count("{") == text.count("}") > 0
    assert f" {name}(" in text and text.rstrip().endswith("}")


def test_the_header_is_the_opening_comment():
    lines = moe_sources.header().splitlines()
    assert all(line.startswith("//") for line in lines) and "start from the expert's bias" in " ".join(lines)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: moe_sources.function("nothing"), "0 functions called 'nothing'"),
    (lambda: moe_sources.source("other.cu"), "there is decode_gemm.cu"),
    (lambda: moe_sources.source("../routing.py"), "no CUDA source"),
    (lambda: moe_promotion.accumulate(PRODUCT, "elsewhere"), "'elsewhere'"),
])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
