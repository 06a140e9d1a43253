"""The peer: DeepGEMM's grouped FP8 GEMM, which has no bias. Its bias rides in the SwiGLU and the combine kernel.

Needs the wheel `sgl-deep-gemm` (import name deep_gemm) built for the torch that is installed, and nvcc for its run-time
compilation. Rows of an expert are aligned to 128; padding rows are marked -1, which it skips in blocks of 64.
"""
from __future__ import annotations

import importlib.util

import torch

from gptoss_kernels.moe import gemm_cuda


def obstacle(device: torch.device | str | None = None, **needs: object) -> str | None:
    """Why DeepGEMM cannot run for these needs, or None."""
    if needs.get("expert_form") != "fp8":
        return f"it multiplies e4m3 weights in 128x128 blocks, expert_form 'fp8'; it is {needs.get('expert_form')!r}"
    if importlib.util.find_spec("deep_gemm") is None:
        return "the package sgl-deep-gemm is not installed"
    reason = gemm_cuda.obstacle(device, **needs)
    return None if reason is None or "NVRTC" in reason else reason


def grouped_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, row_expert: torch.Tensor
) -> torch.Tensor:
    """y[m] = a[m] . b[row_expert[m]]^T. a: [M, K] e4m3, a_scale [M, ceil(K/128)] fp32 column-major, b [E, N, K] e4m3,
    b_scale [E, ceil(N/128), ceil(K/128)] fp32, row_expert [M] int32 (-1: padding). Returns [M, N] bf16."""
    import deep_gemm

    y = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), y, row_expert)
    return y
