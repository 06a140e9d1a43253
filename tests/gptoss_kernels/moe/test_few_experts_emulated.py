"""The experts of one token run without a GPU (`../projection/emulated/hopper.cuh`): both launches, against the plain
form. It shows what every thread chooses, reads and writes, not how fast."""
import ctypes

import pytest
import torch

from gptoss_kernels.moe.few_cuda import ROWS, few_defines
from gptoss_kernels.reference.experts import ExpertMatrices, moe
from gptoss_kernels.reference.moe import route
from gptoss_kernels.reference.quant import dequantise_groups, quantise_groups

RUN = (
    """
extern "C" void run(int blocks, const void* logits, const void* real, const void* x, const void* x_scale,
                    long long scale_row, long long scale_group, const void* w, const void* scale, const void* bias,
                    void* h, int first, int here) {
    run_grid(blocks, WARPS * 32, few_experts, (const float*)logits, (const int*)real, (const uint8*)x,
             (const float*)x_scale, scale_row, scale_group, (const uint8*)w, (const float*)scale, (const float*)bias,
             (uint16*)h, first, here);
}
""",
    """
extern "C" void run(int blocks, const void* logits, const void* real, const void* h, const void* w, const void* scale,
                    const void* bias, const void* residual, void* out, int first, int here) {
    run_grid(blocks, WARPS * 32, few_experts, (const float*)logits, (const int*)real, (const uint16*)h,
             (const uint8*)w, (const float*)scale, (const float*)bias, (const uint16*)residual, (uint16*)out, first,
             here);
}
""",
)
HIDDEN, INNER, E = 192, 64, 40                  # a block and a half of columns; more experts than lanes


def matrices(rows, columns, experts, g):
    values = (40 * torch.randn(experts, rows, columns, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ExpertMatrices("fp8", values, torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=g) / 64)


def at(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize(("tokens", "top", "real", "held", "residual"), [
    (1, 4, None, (0, E), True), (1, 3, None, (10, 20), False), (2, 2, 1, (0, E), False)])
def test_few_experts(on_host, tokens, top, real, held, residual):
    """Ties, experts that are elsewhere, padding tokens; what nobody writes is never used."""
    g = torch.Generator().manual_seed(3)
    first, here = held[0], held[1] - held[0]
    x = (2 * torch.randn(tokens, HIDDEN, generator=g)).bfloat16()
    q, q_scale = quantise_groups(torch.randn(tokens, HIDDEN, generator=g))
    q_scale = q_scale.T.contiguous().T                                    # rows are neighbours, as the kernels write
    up, down = matrices(2 * INNER, HIDDEN, here, g), matrices(HIDDEN, INNER, here, g)
    up_bias, down_bias = torch.randn(here, 2 * INNER, generator=g), torch.randn(here, HIDDEN, generator=g)
    logits = torch.randn(tokens, E, generator=g)
    logits[0, [4, 15, 35]] = 4.0                                          # a tie of three
    logits[0, 17] = 5.0
    count = None if real is None else torch.tensor([real], dtype=torch.int32)
    h = torch.full((tokens * top, INNER), torch.nan, dtype=torch.float16)
    out = torch.full((tokens + 1, HIDDEN), torch.nan, dtype=torch.bfloat16)
    first_run, second_run = (on_host("few_experts.cu", RUN[part], few_defines(part, HIDDEN, INNER, E, top), part).run
                             for part in (0, 1))
    first_run(tokens * top * (2 * INNER // ROWS[0]), *map(at, (logits, count, q, q_scale)),
              *map(ctypes.c_longlong, q_scale.stride()), *map(at, (up.values, up.scales, up_bias, h)), first, here)
    second_run(tokens * (HIDDEN // ROWS[1]), *map(at, (logits, count, h, down.values, down.scales, down_bias,
                                                       x if residual else None, out)), first, here)
    ids, shares = route(logits, top)
    assert ids[0].tolist() == [17, 4, 15, 35][:top]
    if real is not None:
        ids[real:] = -1
    exact = moe(dequantise_groups(q, q_scale).double(), ids, shares.double(), up, up_bias.double(), down,
                down_bias.double(), first_expert=first)
    written = ((ids >= held[0]) & (ids < held[1])).flatten()
    assert h[written].isfinite().all() and h[~written].isnan().all() and out[tokens:].isnan().all()
    ours = out[:tokens].double() - (x.double() if residual else 0)
    limit = 2**-8 * (x.double() if residual else exact).norm() + 2e-3 * exact.norm()
    assert (ours - exact).norm() <= limit
    assert real is None or not ours[real:].any()
