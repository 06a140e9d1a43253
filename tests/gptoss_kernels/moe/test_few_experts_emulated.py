"""The experts of one token run without a GPU (`../projection/emulated/hopper.cuh`): both launches, against the plain
form. It shows what every thread chooses, reads and writes, not how fast."""
import ctypes

import pytest
import torch

from gptoss_kernels.moe.few_cuda import ROWS, Teams, few_defines, few_source
from gptoss_kernels.reference.experts import ExpertMatrices, moe
from gptoss_kernels.reference.moe import route
from gptoss_kernels.reference.quant import dequantise_groups, quantise_groups

GIVEN = {                                       # how few_experts.cu and few_packed.cu differ
    "fp8": ("few_experts", "WARPS * 32", "(const float*)scale", ""),
    "mxfp4": ("few_packed", "THREADS", "(const uint8*)scale", ", ctas"),
}


def run_of(form, part):
    """C++ that calls the kernel of a part."""
    kernel, threads, scale, more = GIVEN[form]
    if part == 0:
        return f"""
extern "C" void run(int blocks, const void* logits, const void* real, const void* x, const void* x_scale,
                    long long scale_row, long long scale_group, const void* w, const void* scale, const void* bias,
                    void* h, int first, int here, int ctas) {{
    run_grid(blocks, {threads}, {kernel}, (const float*)logits, (const int*)real, (const uint8*)x,
             (const float*)x_scale, scale_row, scale_group, (const uint8*)w, {scale}, (const float*)bias, (uint16*)h,
             first, here{more});
}}
"""
    return f"""
extern "C" void run(int blocks, const void* logits, const void* real, const void* h, const void* w, const void* scale,
                    const void* bias, const void* residual, void* out, int first, int here, int ctas) {{
    run_grid(blocks, {threads}, {kernel}, (const float*)logits, (const int*)real, (const uint16*)h, (const uint8*)w,
             {scale}, (const float*)bias, (const uint16*)residual, (uint16*)out, first, here{more});
}}
"""


HIDDEN, INNER, E = 192, 64, 40                  # a block and a half of columns; more experts than lanes


def matrices(form, rows, columns, experts, g):
    if form == "mxfp4":
        codes = torch.randint(256, (experts, rows, columns // 32, 16), generator=g, dtype=torch.uint8)
        return ExpertMatrices(form, codes, torch.randint(118, 126, codes.shape[:3], generator=g, dtype=torch.uint8))
    values = (40 * torch.randn(experts, rows, columns, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ExpertMatrices("fp8", values, torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=g) / 64)


def at(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize(("form", "tuned"), [("fp8", None), ("mxfp4", None), ("mxfp4", Teams(2, 3, 4))])
@pytest.mark.parametrize(("tokens", "top", "real", "held", "residual"), [
    (1, 4, None, (0, E), True), (1, 3, None, (10, 20), False), (2, 2, 1, (0, E), False)])
def test_few_experts(on_host, form, tuned, tokens, top, real, held, residual):
    """Ties, experts that are elsewhere, padding tokens; what nobody writes is never used. Of MXFP4 two CTAs a
    token, so that places are used again and teams have more tiles than one."""
    g = torch.Generator().manual_seed(3)
    first, here = held[0], held[1] - held[0]
    x = (2 * torch.randn(tokens, HIDDEN, generator=g)).bfloat16()
    q, q_scale = quantise_groups(torch.randn(tokens, HIDDEN, generator=g))
    q_scale = q_scale.T.contiguous().T                                    # rows are neighbours, as the kernels write
    up, down = matrices(form, 2 * INNER, HIDDEN, here, g), matrices(form, HIDDEN, INNER, here, g)
    up_bias, down_bias = torch.randn(here, 2 * INNER, generator=g), torch.randn(here, HIDDEN, generator=g)
    logits = torch.randn(tokens, E, generator=g)
    logits[0, [4, 15, 35]] = 4.0                                          # a tie of three
    logits[0, 17] = 5.0
    count = None if real is None else torch.tensor([real], dtype=torch.int32)
    h = torch.full((tokens * top, INNER), torch.nan, dtype=torch.float16)
    out = torch.full((tokens + 1, HIDDEN), torch.nan, dtype=torch.bfloat16)
    first_run, second_run = (
        on_host(few_source(form), run_of(form, part), few_defines(part, form, HIDDEN, INNER, E, top, tuned=tuned), part)
        .run for part in (0, 1))
    tiles, ctas = (top * 2 * INNER // ROWS[0], HIDDEN // ROWS[1]), 2
    blocks = [tokens * (n if form == "fp8" else ctas) for n in tiles]
    first_run(blocks[0], *map(at, (logits, count, q, q_scale)), *map(ctypes.c_longlong, q_scale.stride()),
              *map(at, (up.values, up.scales, up_bias, h)), first, here, ctas)
    second_run(blocks[1], *map(at, (logits, count, h, down.values, down.scales, down_bias, x if residual else None,
                                    out)), first, here, ctas)
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
