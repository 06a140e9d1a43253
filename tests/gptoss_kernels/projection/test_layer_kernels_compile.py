"""The small kernels of a layer compile for sm_90a without a GPU: no spill, and enough programs fit a multiprocessor."""
from __future__ import annotations

import os
import shutil

import pytest

ahead = pytest.importorskip("gptoss_kernels.projection.ahead")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize("bias", [True, False])
def test_compile_norm_residual(bias):
    """A row of 2880 in 256 threads: 16 values each; 1024 threads and more at once hide the memory's latency."""
    made = ahead.compile_norm_residual(2880, bias=bias)
    print("norm_residual", bias, made)
    assert made.stack == 0 and made.registers <= 64


@pytest.mark.parametrize("tokens", [1, 8192])
@pytest.mark.parametrize("form", [{}, {"contiguous": True}, {"contiguous": True, "placed": True}, {"e4m3": True},
                                  {"e4m3": True, "contiguous": True, "placed": True}])
def test_compile_rope_cache(tokens, form):
    made = ahead.compile_rope_cache(64, 8, 64, tokens, **form)
    print("rope_cache", tokens, form, made)
    assert made.stack == 0 and made.registers <= 96


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize(("n", "k", "norm"), [(5120, 2880, True), (2880, 4096, False)])
def test_compile_few_linear(n, k, norm, tokens, e4m3):
    """Two programs and more on a multiprocessor, each with its stages of weights on the way."""
    made = ahead.compile_few_linear(n, k, tokens, e4m3=e4m3, norm=norm)
    print("few_linear", n, k, tokens, e4m3, made)
    assert made.stack == 0 and 2 * made.registers * made.threads <= 65536 and 2 * made.shared <= 227 * 1024


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize(("n", "k", "norm"), [(5120, 2880, True), (2880, 4096, False)])
def test_compile_few_linear_cuda(n, k, norm, tokens, e4m3):
    """Two CTAs of 256 threads and more on a multiprocessor, so that all of a matrix is asked for at once. The
    forms that run: as `few_form` says, and beside it the other way with the tokens."""
    from gptoss_kernels.moe.cuda import driver
    from gptoss_kernels.projection.few_cuda import few_defines

    for staged, early in [(True, True), (False, True)] if tokens == 8 else [(False, False)]:
        _, used = driver.compile_nvcc("few_linear.cu", dict(few_defines(
            n, k, tokens, e4m3=e4m3, norm=norm, residual=not norm, bias_bf16=not e4m3, staged=staged, early=early)))
        print("few_linear.cu", n, k, tokens, e4m3, staged, early, used)
        assert used["spill_stores"] == used["spill_loads"] == 0 and used["registers"] <= 128


@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (8, 2), (32, 3), (128, 3), (8192, 2), (32768, 3)])
@pytest.mark.parametrize("experts", [32, pytest.param(128, marks=pytest.mark.more_forms)])
def test_compile_routing_with_padding_rows(tokens, launches, experts):
    compiled = ahead.compile_routing(experts, 2880, tokens)
    assert len(compiled) == launches
    for made in compiled:
        print("routing", tokens, experts, made)
        assert made.stack == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096)])
def test_compile_fp8_projections(n, k):
    """QKV and output projection as one group of the grouped GEMM and of its decode form."""
    from gptoss_kernels.moe.cuda import driver
    from gptoss_kernels.moe.decode_cuda import decode_defines
    from gptoss_kernels.moe.gemm_cuda import gemm_defines

    for source, defines in (("grouped_gemm.cu", gemm_defines(n, k, 1, swiglu=False, bias=True)),
                            ("decode_gemm.cu", decode_defines(n, k, "fp8", swiglu=False))):
        _, used = driver.compile_nvcc(source, dict(defines))
        print(source, n, k, used)
        assert used["spill_stores"] == used["spill_loads"] == 0 and used["registers"] <= 168
