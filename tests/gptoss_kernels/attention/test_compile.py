"""The GPU sources compile for sm_90a without a GPU: no spills in loops, wgmma where it belongs, and they fit."""
from __future__ import annotations

import os

import pytest
import torch

from gptoss_kernels.attention import LayerKind

ahead = pytest.importorskip("gptoss_kernels.attention.ahead")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

FULL, SLIDING = LayerKind(64, 8, 64), LayerKind(64, 8, 64, window=128)


@pytest.mark.parametrize(("layer", "page_size"), [(FULL, 0), (SLIDING, 0), (FULL, 64), (SLIDING, 16)])
def test_prefill_uses_wgmma_and_two_programs_fit_a_multiprocessor(layer, page_size):
    made = ahead.compile_prefill(layer, page_size=page_size, lse=True)
    assert made.stack == 0 and made.wgmma > 0
    assert 2 * made.registers * made.threads <= 65536 and 2 * made.shared <= 227 * 1024


@pytest.mark.parametrize("layer", [FULL, SLIDING])
@pytest.mark.parametrize("late", [False, True])
def test_four_decode_programs_fit_a_multiprocessor(layer, late):
    """And the next kernel may start where it is meant to."""
    made = ahead.compile_decode(layer, LATE=late)
    places = {word: made.ptx.find(word) for word in ("griddepcontrol.wait", "griddepcontrol.launch", "mma.sync")}
    assert places["griddepcontrol.wait"] < places["mma.sync"]
    assert (places["griddepcontrol.launch"] > places["mma.sync"]) == late
    assert made.stack == 0 and 4 * made.registers * made.threads <= 65536 and 4 * made.shared <= 227 * 1024
    assert ahead.compile_merge(layer).stack == 0


@pytest.mark.more_forms
@pytest.mark.parametrize("layer", [
    LayerKind(12, 4, 128), LayerKind(8, 8, 32, torch.float16), LayerKind(5, 1, 64, torch.float32, 40),
])
def test_other_shapes_and_formats_compile(layer):
    assert ahead.compile_prefill(layer).registers > 0
    assert ahead.compile_decode(layer, page_size=48).registers > 0


@pytest.mark.parametrize("layer", [FULL, LayerKind(16, 16, 64, torch.float16)])
def test_gluon_kernel(layer):
    """Three warpgroups and a producer take all registers of a multiprocessor; the few spills lie outside the loop."""
    made = ahead.compile_gluon(layer)
    assert made.wgmma == 108 and made.threads == 512 and made.stack <= 64 and made.shared <= 227 * 1024


@pytest.mark.more_forms
@pytest.mark.parametrize(("layer", "pages"), [(FULL, {}), (SLIDING, {}), (FULL, {"page_size": 64, "e4m3": True})])
def test_e4m3_output_costs_no_program_and_no_spill(layer, pages):
    """On the H200's Triton 122, 82 and 128 registers where the bf16 output takes 123, 94 and 128; and a store of half
    the bytes."""
    made, plain = (ahead.compile_prefill(layer, quantise=quantise, **pages) for quantise in (True, False))
    assert made.stack == 0 and made.wgmma == plain.wgmma and "cvt.rn.satfinite.e4m3x2.f32" in made.ptx
    assert 2 * made.registers * made.threads <= 65536 and made.shared <= plain.shared
    assert "e4m3x2.f32" not in plain.ptx


@pytest.mark.more_forms
@pytest.mark.parametrize("lse", [False, True])
def test_gluon_kernel_with_e4m3_output(lse):
    """It spills no byte that the bf16 form does not: a consumer has 160 registers, and they are full."""
    made, plain = (ahead.compile_gluon(FULL, lse=lse, quantise=quantise) for quantise in (True, False))
    assert made.stack <= plain.stack and made.registers <= plain.registers and made.shared <= plain.shared + 64
    assert made.wgmma == plain.wgmma and "cvt.rn.satfinite.e4m3x2.f32" in made.ptx


@pytest.mark.more_forms
@pytest.mark.parametrize("layer", [FULL, SLIDING])
def test_e4m3_pages_cost_no_program_and_no_spill(layer):
    """Half the shared memory for keys and values; they are widened in registers, and as many programs fit as before."""
    prefill = ahead.compile_prefill(layer, page_size=64, lse=True, e4m3=True)
    decode = ahead.compile_decode(layer, e4m3=True)
    assert prefill.stack == 0 and prefill.wgmma > 0 and decode.stack == 0
    assert 2 * prefill.registers * prefill.threads <= 65536 and 2 * prefill.shared <= 227 * 1024
    assert 4 * decode.registers * decode.threads <= 65536
    assert decode.shared < 0.6 * ahead.compile_decode(layer).shared
