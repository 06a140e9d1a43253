"""The combine that norms as well, compiled for sm_90a without a GPU: no spill, rows asked for 16 bytes at a time."""
from __future__ import annotations

import os

import pytest

ahead = pytest.importorskip("gptoss_kernels.moe.ahead")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize("columns", [2880, 4096])
def test_compile_combine_norm(columns):
    made = ahead.compile_combine_norm(columns)
    print("combine_norm", columns, made)
    assert made.stack == 0 and 65536 // (made.registers * made.threads) * made.threads // 32 >= 20
    assert "ld.global.v4.b32" in made.ptx
