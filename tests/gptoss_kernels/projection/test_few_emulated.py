"""The CUDA kernel for a few tokens, run without a GPU: its source compiled for the host, every CUDA thread a stack on
the host (`emulated/hopper.cuh`), against the plain form. It shows that every thread reads and writes what is right, not
how fast."""
import ctypes

import pytest
import torch

from gptoss_kernels.projection.few_cuda import ROWS, few_defines
from gptoss_kernels.reference.fused import few_linear

RUN = """
extern "C" void run(const void* x, const void* w, const void* scale, const void* bias, const void* gain,
                    const void* residual, void* y, int tokens) {
    run_grid(N / ROWS, WARPS * 32, few_linear, (const uint16*)x, (const uint8*)w, (const float*)scale, bias,
             (const float*)gain, (const uint16*)residual, (uint16*)y, tokens);
}
"""


# Every form that `few_form` takes, and the plain one for few tokens too.
FORMS = [(1, 8, True, True), (1, 8, False, False), (8, 8, True, True), (8, 8, False, True), (11, 16, False, False),
         (32, 32, False, False)]


@pytest.mark.parametrize(("tokens", "most", "staged", "early"), FORMS)
@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_few_linear(on_host, tokens, most, e4m3, normed, staged, early):
    """320 columns: one warp has fewer chunks than the others; the last group of 128 is half."""
    n, k = 144, 320
    g = torch.Generator().manual_seed(tokens)
    x = (torch.randn(tokens, k, generator=g) * 3).bfloat16()
    weight, more = torch.randn(n, k, generator=g), {}
    if e4m3:
        weight = (40 * weight).clamp(-448, 448).to(torch.float8_e4m3fn)
        more["scale_inv"] = torch.rand(-(-n // 128), -(-k // 128), generator=g) / 64
        assert (weight.view(torch.uint8) & 0x78 == 0).any()                      # e4m3's own subnormals take part
    else:
        weight = weight.bfloat16()
    bias = torch.randn(n, generator=g).to(torch.float32 if e4m3 else torch.bfloat16)
    if normed:
        more["norm_weight"] = torch.rand(k, generator=g) + 0.5
    else:
        more["residual"] = torch.randn(tokens, n, generator=g).bfloat16()
    run = on_host("few_linear.cu", RUN, few_defines(n, k, most, e4m3=e4m3, norm=normed, residual=not normed,
                                                    bias_bf16=not e4m3, staged=staged, early=early)).run
    y = torch.full((tokens + 1, n), torch.nan, dtype=torch.bfloat16)
    given = (x, weight, more.get("scale_inv", bias), bias, more.get("norm_weight", bias), more.get("residual", bias), y)
    run(*(ctypes.c_void_p(t.data_ptr()) for t in given), tokens)
    wide = {name: value.double() for name, value in more.items() if name != "scale_inv"}
    scales = {"scale_inv": more["scale_inv"]} if e4m3 else {}
    exact = few_linear(x.double(), weight if e4m3 else weight.double(), bias.double(), **wide, **scales)
    error = (y[:tokens].double() - exact).norm() / exact.norm()
    assert error < 4e-3 and y[tokens:].isnan().all() and n % ROWS == 0
