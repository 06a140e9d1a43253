"""The grouped GEMM in plain Triton: any GPU that Triton knows, and the interpreter on a CPU.

y[m, n] = bias[e, n] + sum_kb sa[m, kb] * sb[e, n / 128, kb] * (A[m, kb] . B[e, n, kb]), one program per tile of rows
and 128 columns. The fp32 accumulator starts from the bias. It reads with plain pointers, so it is far slower than the
Hopper kernel; it is the form to read first, and the one that runs anywhere.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_kernels.quant.rounding import operand, to_dtype


@triton.jit
def _grouped_gemm_kernel(a_ptr, sa_ptr, b_ptr, sb_ptr, bias_ptr, y_ptr, tile_expert_ptr, tile_rows_ptr, sa_row_stride,
                         sa_group_stride, N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
                         BLOCK_M: tl.constexpr):
    groups: tl.constexpr = (K + 127) // 128
    blocks: tl.constexpr = (N + 127) // 128
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        live = tl.arange(0, BLOCK_M) < tl.load(tile_rows_ptr + tile)
        n = block * 128 + tl.arange(0, 128)
        acc = tl.zeros((BLOCK_M, 128), dtype=tl.float32)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[None, :]
        for kb in range(groups):
            k = kb * 128 + tl.arange(0, 128)
            a = tl.load(a_ptr + row.to(tl.int64)[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :],
                        other=0.0)
            b = tl.load(b_ptr + (expert * N + n)[None, :] * K + k[:, None], mask=(k < K)[:, None] & (n < N)[None, :],
                        other=0.0)
            sa = tl.load(sa_ptr + row * sa_row_stride + kb * sa_group_stride, mask=live, other=0.0)
            sb = tl.load(sb_ptr + (expert * blocks + block) * groups + kb)
            acc += tl.dot(operand(a), operand(b)) * (sa * sb)[:, None]
        tl.store(y_ptr + row.to(tl.int64)[:, None] * N + n[None, :], to_dtype(acc, y_ptr.dtype.element_ty),
                 mask=live[:, None] & (n < N)[None, :])


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile_expert: torch.Tensor,
    tile_rows: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """a: [M, K] float8_e4m3fn, rows of a tile side by side. a_scale: [M, ceil(K/128)] fp32, any strides. b: [E, N, K]
    float8_e4m3fn. b_scale: [E, ceil(N/128), ceil(K/128)] fp32. bias: [E, N] fp32 or None. tile_expert, tile_rows:
    [M / R] int32, expert (-1: none) and real rows of each tile of R rows, R a power of two of at least 16.
    Returns [M, N] in dtype (bf16 or fp32); rows that are not real are left as they are.
    """
    m, k = a.shape
    e, n, bk = b.shape
    tiles = tile_expert.shape[0]
    if bk != k or a_scale.shape != (m, -(-k // 128)) or b_scale.shape != (e, -(-n // 128), -(-k // 128)):
        raise ValueError(f"grouped_gemm: a {[m, k]}, scale {list(a_scale.shape)}, b {[e, n, bk]}, scale "
                         f"{list(b_scale.shape)}; equal K and one scale per 128 columns are needed")
    if tiles == 0 or m % tiles or m // tiles < 16 or not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"grouped_gemm: {m} rows in {tiles} tiles; equal contiguous tiles of 16 rows or more")
    if bias is not None and bias.shape != (e, n):
        raise ValueError(f"grouped_gemm: bias has shape {list(bias.shape)}; {[e, n]} is needed")
    y = torch.empty(m, n, dtype=dtype, device=a.device)
    _grouped_gemm_kernel[(tiles, triton.cdiv(n, 128))](
        a, a_scale, b, b_scale, a_scale if bias is None else bias, y, tile_expert, tile_rows, *a_scale.stride(), N=n,
        K=k, HAS_BIAS=bias is not None, BLOCK_M=m // tiles, num_warps=4, num_stages=3)
    return y
