"""Quantisation kernels in the interpreter against the plain reference, code by code."""
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.quant import (
    Quantised,
    empty_quantised,
    norm_quant,
    norm_quantise,
    place_rows,
    place_scales,
    swiglu_quant,
    swiglu_quantise,
)
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import dequantise_groups, quantise_groups


def codes_agree(q: torch.Tensor, want: torch.Tensor, share: float = 0.999) -> bool:
    """Equal but for a few values that lie on the edge of two codes, and those are neighbours."""
    a, b = q.view(torch.uint8).int(), want.view(torch.uint8).int()
    return bool((a == b).float().mean() >= share and (a - b).abs().max() <= 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.sampled_from([64, 128, 192, 320, 2880]), st.floats(1e-6, 1e4), st.integers(0, 1000))
def test_plain_quantisation(rows, columns, size, seed):
    x = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    q, scale = norm_quantise(x)
    want, want_scale = quantise_groups(x)
    assert scale.shape == (rows, -(-columns // 128)) and torch.equal(scale, want_scale)
    assert codes_agree(q, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_the_norm_2880_columns_are_22_groups_and_a_half(dtype):
    g = torch.Generator().manual_seed(1)
    x, gain = torch.randn(3, 2880, generator=g).to(dtype), (torch.rand(2880, generator=g) + 0.5).to(dtype)
    q, scale = norm_quantise(x, gain)
    normed = rms_norm(x, gain)
    assert scale.shape == (3, 23)
    error = (dequantise_groups(q, scale) - normed.float()).norm() / normed.float().norm()
    assert error < 3e-2
    assert torch.allclose(scale[:, 22], normed[:, 2816:].abs().amax(dim=1).float() / 448, rtol=1e-2)


def test_rows_go_to_all_their_places_and_nowhere_else():
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(2))
    row_of = torch.tensor([[4, 0], [-1, 2], [6, 5]], dtype=torch.int32)
    q, scale = norm_quantise(x, row_of=row_of, rows=8)
    want, want_scale = quantise_groups(x)
    for t in range(3):
        for row in row_of[t].tolist():
            if row >= 0:
                assert torch.equal(q[row].float(), want[t].float()) and torch.equal(scale[row], want_scale[t])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("columns", [1100, 2880])
def test_in_chunks_as_in_one_piece(monkeypatch, columns, normed):
    g = torch.Generator().manual_seed(4)
    x, gain = torch.randn(3, columns, generator=g).bfloat16(), (torch.rand(columns, generator=g) + 0.5).bfloat16()
    given = {"row_of": torch.tensor([[4, 0], [-1, 2], [6, 5]], dtype=torch.int32), "rows": 8}
    whole, whole_scale = norm_quantise(x, gain if normed else None, **given)
    chunked = {"GROUPS": 8, "num_warps": 4, "maxnreg": 40}
    monkeypatch.setattr(norm_quant, "norm_quantise_config", lambda t, h, placed: chunked)
    q, scale = norm_quantise(x, gain if normed else None, **given)
    used = [0, 2, 4, 5, 6]
    assert torch.allclose(scale[used], whole_scale[used], rtol=1e-2 if normed else 0)
    assert codes_agree(q[used], whole[used]) and (normed or torch.equal(q[used].float(), whole[used].float()))


def test_a_group_too_small_to_invert_is_zeros():
    x = torch.full((1, 256), 1e-38)
    x[0, 200] = 1.0
    q, scale = norm_quantise(x)
    assert scale[0, 0] == 1 and (q[0, :128].float() == 0).all() and q[0, 200].float() == 448


def test_zeros_have_scale_one_and_nan_stays_in_its_row():
    x = torch.zeros(2, 128)
    x[1, 5] = torch.nan
    q, scale = norm_quantise(x)
    assert scale[0, 0] == 1 and (q[0].float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_with_bias(dtype):
    g = torch.Generator().manual_seed(3)
    y, bias = (3 * torch.randn(32, 384, generator=g)).to(dtype), torch.randn(2, 384, generator=g)
    row_expert = torch.tensor([0] * 5 + [-1] * 11 + [1] * 16, dtype=torch.int32)
    q, scale = swiglu_quantise(y, row_expert, bias)
    real = row_expert >= 0
    h = swiglu(y[real].float() + bias[row_expert[real].long()])
    want, want_scale = quantise_groups(h)
    assert torch.allclose(scale[real], want_scale, rtol=1e-5)
    assert codes_agree(q[real], want, 0.995)
    assert ((dequantise_groups(q, scale)[real] - h).norm() / h.norm()) < 3e-2


def test_swiglu_values_of_the_specification():
    pairs = {(10.0, 10.0): 55.999625, (10.0, -10.0): -41.999719, (2.0, -1.0): 0.0, (1.0, 0.0): 0.845796}
    for pair, want in pairs.items():
        y = torch.zeros(16, 256)
        y[0, 0], y[0, 1] = pair
        q, scale = swiglu_quantise(y, torch.zeros(16, dtype=torch.int32))
        assert dequantise_groups(q, scale)[0, 0] == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("options", [{"ROWS": 8, "GROUPS": 1}, {"ROWS": 16, "GROUPS": 2}])
def test_swiglu_in_other_blocks(monkeypatch, options):
    y = torch.randn(32, 640, generator=torch.Generator().manual_seed(5)).bfloat16()
    row_expert = torch.tensor([0] * 9 + [-1] * 7 + [1] * 16, dtype=torch.int32)
    want, want_scale = swiglu_quantise(y, row_expert)
    monkeypatch.setattr(swiglu_quant, "swiglu_quantise_config", lambda: {**options, "num_warps": 4})
    q, scale = swiglu_quantise(y, row_expert)
    real = row_expert >= 0
    assert torch.equal(q[real].float(), want[real].float()) and torch.equal(scale[real], want_scale[real])


def test_gate_and_up_alternate():
    """[1, 10, 2, 20]: pairs (1, 10) and (2, 20), not halves (1, 2) and (10, 20)."""
    y = torch.zeros(16, 256)
    y[:, :4] = torch.tensor([1.0, 10, 2, 20])
    q, scale = swiglu_quantise(y, torch.zeros(16, dtype=torch.int32))
    h = dequantise_groups(q, scale)[0, :2]
    assert torch.allclose(h, torch.tensor([6.766366, 15.485269]), rtol=4e-2)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: norm_quantise(torch.zeros(2, 4, 8)), r"\[T, H\] contiguous"),
    (lambda: norm_quantise(torch.zeros(2, 64), torch.zeros(32)), "norm weight"),
    (lambda: norm_quantise(torch.zeros(2, 64), row_of=torch.zeros(2, 1, dtype=torch.int32)), "rows missing"),
    (lambda: norm_quantise(torch.zeros(2, 64), rows=1), "do not fit"),
    (lambda: norm_quantise(torch.zeros(2, 64), row_of=torch.zeros(3, 1, dtype=torch.int32), rows=4), "row_of"),
    (lambda: place_rows(empty_quantised(2, 64, "cpu"), torch.zeros(3, 1, dtype=torch.int32), 4), "at least 3 rows"),
    (lambda: place_rows(empty_quantised(3, 62, "cpu"), torch.zeros(3, 1, dtype=torch.int32), 4), "multiple of 4"),
    (lambda: place_scales(torch.zeros(3, 1), torch.zeros(33, dtype=torch.int32)), "multiple of 32"),
    (lambda: place_scales(torch.zeros(3), torch.zeros(32, dtype=torch.int32)), r"fp32 \[T, G\]"),
    (lambda: swiglu_quantise(torch.zeros(16, 3), torch.zeros(16, dtype=torch.int32)), "2 I"),
    (lambda: swiglu_quantise(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int32)), "multiple of 16"),
    (lambda: swiglu_quantise(torch.zeros(16, 4), torch.zeros(16, dtype=torch.int32), torch.zeros(1, 6)), "bias"),
])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("columns", [64, 192, 2880])
@pytest.mark.parametrize("column_major", [True, False])
def test_quantised_rows_go_to_their_places(columns, column_major):
    """Bit for bit what `norm_quantise` puts there, out of a buffer of more rows, and nowhere else."""
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(6))
    row_of = torch.tensor([[4, 0], [-1, 2], [6, -1]], dtype=torch.int32)
    rows = norm_quantise(x, rows=5)
    if not column_major:
        rows = Quantised(rows.values, rows.scale.contiguous())
    q, scale = place_rows(rows, row_of, 8)
    want, want_scale = norm_quantise(x, row_of=row_of, rows=8)
    used = [0, 2, 4, 6]
    assert torch.equal(q.view(torch.uint8)[used], want.view(torch.uint8)[used])
    assert torch.equal(scale[used], want_scale[used]) and scale.stride(0) == 1


@pytest.mark.parametrize("columns", [64, 192, 2880])
@pytest.mark.parametrize("by_row", [True, False])
def test_scales_go_where_the_tokens_of_rows_go(columns, by_row):
    """Rows in their order, scales sorted: together what `norm_quantise` writes to the places."""
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(7))
    row_of = torch.tensor([[4, 33], [-1, 2], [6, -1]], dtype=torch.int32)
    token_of = torch.full((64,), -1, dtype=torch.int32)
    token_of[[4, 33, 2, 6]] = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    rows = norm_quantise(x, out=empty_quantised(5, columns, "cpu", by_row=by_row))
    assert rows.scale.stride(1 if by_row else 0) == 1
    scale = place_scales(rows.scale, token_of)
    want, want_scale = norm_quantise(x, row_of=row_of, rows=64)
    used = [2, 4, 6, 33]
    assert torch.equal(scale[used], want_scale[used]) and scale.shape == want_scale.shape and scale.stride(0) == 1
    assert torch.equal(rows.values.view(torch.uint8)[token_of[used].long()], want.view(torch.uint8)[used])


def test_places_that_nobody_has_stay_as_they_are(monkeypatch):
    kept = Quantised(torch.full((8, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.full((8, 1), 7.0))
    monkeypatch.setattr(sys.modules[place_rows.__module__], "empty_quantised", lambda *_: kept)
    place_rows(norm_quantise(torch.randn(2, 64)), torch.tensor([[5], [-1]], dtype=torch.int32), 8)
    others = [0, 1, 2, 3, 4, 6, 7]
    assert (kept.values.view(torch.uint8)[others] == 0x7F).all() and (kept.scale[others] == 7).all()
    assert kept.scale[5] != 7
