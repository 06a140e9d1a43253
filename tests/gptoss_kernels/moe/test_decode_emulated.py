"""The decode GEMM run without a GPU (`../projection/emulated/hopper.cuh`): both weight forms and epilogues, the plain
and the chosen tunings, tiles of few and of many tokens, against the plain form. It shows what every thread reads, waits
for and writes, not how fast."""
import ctypes

import pytest
import torch

from gptoss_kernels.moe.decode_cuda import TILE, TUNED, Tuning, decode_defines
from gptoss_kernels.reference.experts import ExpertMatrices, dense_matrix
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.quant import dequantise_groups, quantise_groups

RUN = """
extern "C" void run(int blocks, const void* w, int w_rows, const void* x, const void* x_scale, long long scale_row,
                    long long scale_group, const void* token_of, const void* w_scale, const void* bias,
                    const void* tile_expert, const void* tile_rows, int tiles, void* out, void* out_scale,
                    int out_scale_stride) {
    TensorMap map = {(const uint8*)w, w_rows, ROW_BYTES};
    run_grid(blocks, THREADS + PRODUCER, decode_gemm, map, (const uint8*)x, (const float*)x_scale, scale_row,
             scale_group, (const int*)token_of, w_scale, (const float*)bias, (const int*)tile_expert,
             (const int*)tile_rows, tiles, out, (float*)out_scale, out_scale_stride);
}
"""
N, E = 320, 3                               # the last item is half
TILES = {                                   # expert and rows
    "an expert has two tiles": [(2, 3), (0, 16), (0, 5), (-1, 0)],
    "each has one": [(1, 9), (2, 3), (0, 16), (-1, 0)],
    "there is none": [(-1, 0)] * 4,
}
FORMS = [                                   # and K; of 1856, as of 2880, the last stage holds 64
    ("fp8", TUNED["fp8"], 320), ("mxfp4", Tuning(), 320), ("mxfp4", TUNED["mxfp4"], 1856),
]


def matrices(form, k, g):
    if form == "fp8":
        values = (40 * torch.randn(E, N, k, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return ExpertMatrices(form, values, torch.rand(E, -(-N // 128), -(-k // 128), generator=g) / 64)
    codes = torch.randint(0, 256, (E, N, k // 32, 16), generator=g, dtype=torch.uint8)
    return ExpertMatrices(form, codes, torch.randint(116, 121, codes.shape[:3], generator=g, dtype=torch.uint8))


@pytest.mark.parametrize("is_swiglu", [True, False])
@pytest.mark.parametrize(("form", "tuning", "k"), FORMS)
def test_decode_gemm(on_host, form, tuning, k, is_swiglu):
    defines = decode_defines(N, k, form, swiglu=is_swiglu, tuning=tuning)
    run = on_host("decode_gemm.cu", RUN, defines).run
    for tiles in TILES.values():
        check(run, tiles, form, k, is_swiglu, torch.Generator().manual_seed(tuning.threads))


def check(run, tiles, form, k, is_swiglu, g):
    w, rows = matrices(form, k, g), len(tiles) * TILE
    x, x_scale = quantise_groups(torch.randn(7 if is_swiglu else rows, k, generator=g))
    token_of = torch.randint(0, 7, (rows,), generator=g, dtype=torch.int32)
    bias = torch.randn(E, N, generator=g)
    expert, real = (torch.tensor(column, dtype=torch.int32) for column in zip(*tiles, strict=True))
    out = torch.full((rows, N // 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)      # NaN
    out_scale = torch.full((-(-N // 256), rows), torch.nan)
    if not is_swiglu:
        out = torch.full((rows, N), torch.nan, dtype=torch.bfloat16)
    values, given, given_scale, gathered, scales, biases, experts, reals, y, y_scale = (
        ctypes.c_void_p(t.data_ptr()) for t in
        (w.values, x, x_scale, token_of, w.scales, bias, expert, real, out, out_scale))
    run(2, values, E * N, given, given_scale, *map(ctypes.c_longlong, x_scale.stride()),
        gathered if is_swiglu else None, scales, biases, experts, reals, len(tiles), y, y_scale, rows)
    wide = dequantise_groups(x, x_scale)
    for tile, (e, count) in enumerate(tiles):
        at = torch.arange(tile * TILE, tile * TILE + count)
        exact = wide[token_of[at].long() if is_swiglu else at] @ dense_matrix(w, e, torch.float32).T + bias[e]
        ours = out[at].float()
        if is_swiglu:
            exact, ours = swiglu(exact), dequantise_groups(out.view(torch.uint8)[at].view(out.dtype), out_scale.T[at])
        if count:
            assert (ours - exact).norm() / exact.norm() < (3e-2 if is_swiglu else 2e-3)
        padding = torch.arange(tile * TILE + count, (tile + 1) * TILE)
        assert out.float()[padding].isnan().all()
