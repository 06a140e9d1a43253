"""Layers and routings for the interpreter tests: small, and off every multiple of 128."""
import torch

from gptoss_kernels.moe import LayerWeights
from gptoss_kernels.reference.experts import ExpertMatrices


def fp8_matrices(generator: torch.Generator, experts: int, rows: int, columns: int) -> ExpertMatrices:
    """Random e4m3 weights of every magnitude but NaN, random power-of-two block scales."""
    codes = torch.randint(0, 256, (experts, rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    shape = (experts, -(-rows // 128), -(-columns // 128))
    scales = torch.exp2(torch.randint(-12, -8, shape, generator=generator).float())
    return ExpertMatrices("fp8", codes.view(torch.float8_e4m3fn), scales)


def layer(seed: int = 0, experts: int = 6, hidden: int = 192, inner: int = 160, dtype: torch.dtype = torch.float32,
          **changes: object) -> LayerWeights:
    g = torch.Generator().manual_seed(seed)
    fields = {
        "norm": (torch.rand(hidden, generator=g) + 0.5).to(dtype),
        "router": torch.randn(experts, hidden, generator=g).to(dtype),
        "router_bias": torch.randn(experts, generator=g).to(dtype),
        "gate_up": fp8_matrices(g, experts, 2 * inner, hidden),
        "gate_up_bias": torch.randn(experts, 2 * inner, generator=g),
        "down": fp8_matrices(g, experts, hidden, inner),
        "down_bias": torch.randn(experts, hidden, generator=g),
    }
    return LayerWeights(**{**fields, **changes})


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
