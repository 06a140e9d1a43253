"""What the MoE benchmark multiplies: gpt-oss shapes, weights as MXFP4 would give them, real routings.

Weights are random MXFP4 codes over four exponents, in both stored forms: packed, and as the e4m3 numbers they convert
to. Never zeros (they run faster), never random e4m3 bytes (some are NaN).
"""
from __future__ import annotations

from functools import cached_property

import torch

from gptoss_kernels.moe import LayerWeights, Routing
from gptoss_kernels.moe.routing import route
from gptoss_kernels.reference.experts import ExpertMatrices

HIDDEN = INTER = 2880
GATE_UP = 2 * INTER
SHIFTS = 4


def _codes(experts: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [E, rows, 90, 16] and exponent shifts [E, rows, 90] of 0 to 3."""
    g = torch.Generator("cuda").manual_seed(seed)
    packed = torch.randint(0, 256, (experts, rows, HIDDEN // 32, 16), generator=g, device="cuda", dtype=torch.uint8)
    return packed, torch.randint(0, SHIFTS, packed.shape[:3], generator=g, device="cuda", dtype=torch.uint8)


def _as_e4m3(packed: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """The same numbers as e4m3 bytes [E, rows, 2880]: a table of 16 codes by 4 shifts, one expert at a time."""
    magnitudes = torch.tensor([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], dtype=torch.uint8)
    tables = [torch.where(magnitudes > 0, magnitudes + (s << 3), 0) for s in range(SHIFTS)]
    table = torch.stack([torch.cat([t, t | 0x80]) for t in tables]).flatten().to(torch.uint8).cuda()
    out = torch.empty(*packed.shape[:2], HIDDEN, dtype=torch.uint8, device="cuda")
    for e in range(packed.shape[0]):
        codes = torch.stack([packed[e] & 15, packed[e] >> 4], dim=-1).flatten(-2).int()     # [rows, 90, 32]
        out[e] = table[codes + 16 * shifts[e].int()[..., None]].flatten(-2)
    return out.view(torch.float8_e4m3fn)


class Weights:
    """One layer of E experts in both forms, with biases; block scales 2^-10, so MXFP4 exponent bytes are 117 and up."""

    def __init__(self, experts: int) -> None:
        g = torch.Generator("cuda").manual_seed(experts)
        self.experts = experts
        self.norm = (1 + 0.1 * torch.randn(HIDDEN, generator=g, device="cuda")).bfloat16()
        self.router = (torch.randn(experts, HIDDEN, generator=g, device="cuda") / HIDDEN**0.5).bfloat16()
        self.gate_up_bias = torch.randn(experts, GATE_UP, generator=g, device="cuda")
        self.down_bias = torch.randn(experts, HIDDEN, generator=g, device="cuda")
        self.packed, self.fp8 = {}, {}
        for name, rows in (("gate_up", GATE_UP), ("down", HIDDEN)):
            packed, shifts = _codes(experts, rows, rows)
            scales = torch.full((experts, -(-rows // 128), -(-HIDDEN // 128)), 2.0**-10, device="cuda")
            self.packed[name] = ExpertMatrices("mxfp4", packed, shifts + (127 - 10))
            self.fp8[name] = ExpertMatrices("fp8", _as_e4m3(packed, shifts), scales)

    @cached_property
    def bf16(self) -> dict[str, torch.Tensor]:
        """Dequantised, [E, out, in] bf16: exact, since every value has at most three significant bits."""
        return {name: torch.stack([w.bfloat16() * 2.0**-10 for w in m.values]) for name, m in self.fp8.items()}

    def layer(self, form: str, router_bias: torch.Tensor) -> LayerWeights:
        """The layer as the backends take it, in form "fp8" or "mxfp4"."""
        m = self.fp8 if form == "fp8" else self.packed
        return LayerWeights(self.norm, self.router, router_bias, m["gate_up"], self.gate_up_bias, m["down"],
                            self.down_bias)


def router_bias(experts: int, skew: float) -> torch.Tensor:
    """[E] bf16: 0 for uniform routing; with skew s the expert of rank r has -s ln r, so a few experts get most rows."""
    ranks = torch.arange(1, experts + 1, device="cuda").float()
    return (-skew * ranks.log()).bfloat16()


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    """[T, 2880] bf16, normal."""
    g = torch.Generator("cuda").manual_seed(1000 + seed)
    return torch.randn(tokens, HIDDEN, generator=g, device="cuda").bfloat16()


def routed(x: torch.Tensor, layer: LayerWeights, align: int) -> Routing:
    """The routing of these hidden states."""
    return route(x, layer.router, layer.router_bias, norm_weight=layer.norm, align=align)
