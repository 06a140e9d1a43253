"""The quantising kernels compile for sm_90a without a GPU: no spill, and enough warps fit to keep memory busy."""
from __future__ import annotations

import os

import pytest

ahead = pytest.importorskip("gptoss_kernels.quant.ahead")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def warps(made) -> int:
    """Warps that the registers let a multiprocessor hold."""
    return 65536 // (-(-made.registers // 8) * 8 * made.threads) * made.threads // 32


@pytest.mark.parametrize("copies", [0, 4])
@pytest.mark.parametrize("columns", [2880, 4096])
def test_compile_norm_quantise(columns, copies):
    for tokens in (8192, 1):
        made = ahead.compile_norm_quantise(tokens, columns, copies=copies)
        print("norm_quantise", tokens, columns, copies, made)
        assert made.stack == 0 and warps(made) >= 32


def test_compile_swiglu_quantise():
    made = ahead.compile_swiglu_quantise(2880)
    print("swiglu_quantise", made)
    assert made.stack == 0 and warps(made) >= 20


@pytest.mark.parametrize("by_row", [True, False])
def test_compile_place_scales(by_row):
    made = ahead.compile_place_scales(2880, by_row=by_row)
    print("place_scales", by_row, made)
    assert made.stack == 0 and warps(made) >= 40


@pytest.mark.parametrize("columns", [2880, 4096])
def test_compile_place_rows(columns):
    made = ahead.compile_place_rows(columns)
    print("place_rows", columns, made)
    assert made.stack == 0 and warps(made) >= 48
    assert "ld.global.v4.b32" in made.ptx and "st.global.v4.b32" in made.ptx
