"""One product of e4m3 numbers, block by block as the kernel sums it, with an accumulator as narrow as one likes.

The tensor core sums e4m3 products in an accumulator of its own that keeps fewer bits than fp32 (about 14 on Hopper).
Its 128 columns of K share a scale; the next 128 have another. So the kernel takes each part out, scales it, and adds
it to fp32 registers ("promotion"). That is where a bias can start: the registers hold finished numbers. The tensor
core's accumulator holds numbers in units of a row's scale times a block's scale, other ones for every row.

The narrow accumulator is modelled: after each step of 32 columns the exact sum is cut to so many significant bits.
Real hardware aligns and cuts the products before it adds them; the size of the effect is the same, its bits are not.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import plotly.graph_objects as go
import torch

from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups, quantise_groups
from gptoss_lab.checkpoint import fp8
from gptoss_lab.viz import style

BLOCK, STEP = 128, 32
PLACES = ("registers", "tensor core", "one accumulator")
HOPPER_BITS = 14
BITS = tuple(range(10, 25, 2))


@dataclass(frozen=True)
class Product:
    """Operands of one expert's product. a: [R, K] e4m3, a_scale [R, ceil(K/128)] fp32; w: [N, K] e4m3, w_scale
    [ceil(N/128), ceil(K/128)] fp32; bias: [N] fp32."""

    a: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor

    @cached_property
    def steps(self) -> torch.Tensor:
        """[K / 32, R, N] fp64: exact unscaled products of each 32 columns. K is a multiple of 32."""
        a, w = (x.double().unflatten(1, (-1, STEP)).transpose(0, 1) for x in (self.a, self.w))    # [K / 32, .., 32]
        return a @ w.transpose(1, 2)

    def exact(self) -> torch.Tensor:
        """[R, N] fp64: dequantised product plus bias."""
        a = dequantise_groups(self.a, self.a_scale, dtype=torch.float64)
        return a @ dequantise_blocks(self.w, self.w_scale, dtype=torch.float64).T + self.bias.double()


def example(rows: int = 64, n: int = 128, k: int = 2880, bias_size: float = 1.0, seed: int = 0) -> Product:
    """Random activations and weights, quantised as the model's are; outputs of size 1, a bias of size `bias_size`."""
    g = torch.Generator().manual_seed(seed)
    a, a_scale = quantise_groups(torch.randn(rows, k, generator=g))
    w, w_scale, _ = fp8.quantise(torch.randn(n, k, generator=g) / k**0.5, "amax")
    return Product(a, a_scale, w, w_scale, bias_size * torch.randn(n, generator=g))


def keep(x: torch.Tensor, bits: int | None) -> torch.Tensor:
    """x (fp64) cut towards zero to `bits` significant bits of its 53, by its bit pattern; None keeps all."""
    if bits is None:
        return x
    return (x.contiguous().view(torch.int64) & -(1 << 53 - bits)).view(torch.float64)


def accumulate(p: Product, bias: str | None = "registers", bits: int | None = None) -> torch.Tensor:
    """[R, N] fp32 sums as the kernel makes them.

    bias: "registers" starts the fp32 sum with it; "tensor core" starts the first part with bias / scale, one value per
    row and column; "one accumulator" never promotes: scales folded into the operands, all of K in the narrow sum, which
    starts with the bias (no tensor core can: its operands are e4m3); None adds no bias.
    """
    if bias not in (None, *PLACES):
        raise ValueError(f"accumulate: bias goes into {bias!r}; one of {', '.join(PLACES)} or None is expected")
    rows, n = p.a.shape[0], p.w.shape[0]
    total = torch.zeros(rows, n) + (p.bias if bias == "registers" else 0.0)
    running = p.bias.double().expand(rows, n).clone()
    for block, products in enumerate(p.steps.split(BLOCK // STEP)):
        scale = scales(p, block).double()                                      # [R, N]
        part = p.bias / scale if bias == "tensor core" and block == 0 else torch.zeros(rows, n, dtype=torch.float64)
        for product in products:
            if bias == "one accumulator":
                running = keep(running + product * scale, bits)
            else:
                part = keep(part + product, bits)
        total = (total.double() + part * scale).float()                        # one fused multiply-add
    return running.float() if bias == "one accumulator" else total


def scales(p: Product, block: int) -> torch.Tensor:
    """[R, N] fp32: what one K block's part is multiplied by, a row's scale times a weight block's."""
    return p.a_scale[:, block, None] * p.w_scale[:, block].repeat_interleave(BLOCK)[: p.w.shape[0]]


def start_values(p: Product, column: int) -> torch.Tensor:
    """[R] fp32: what the tensor core's accumulator would have to start from for one column's one bias."""
    return p.bias[column] / scales(p, 0)[:, column]


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the exact result."""
    return float((ours.double() - exact).norm() / exact.norm())


def figure(p: Product, bits: Sequence[int] = BITS) -> go.Figure:
    """Error of the three sums, before any rounding to bf16, over the bits that the tensor core's accumulator keeps."""
    exact = p.exact()
    names = {"one accumulator": "all of K in one accumulator", "tensor core": "promoted, bias in the tensor core",
             "registers": "promoted, bias in fp32 registers"}
    errors = {place: [relative_error(accumulate(p, place, b), exact) for b in bits] for place in names}
    fig = go.Figure()
    for (place, name), colour in zip(names.items(), (style.GREY, style.RED, style.BLUE), strict=True):
        fig.add_scatter(x=list(bits), y=errors[place], mode="lines+markers", name=name, line={"color": colour},
                        hovertemplate="%{x} bits: %{y:.1e}<extra>" + name + "</extra>")
    fig.add_scatter(x=[bits[0], bits[-1]], y=[2**-9] * 2, mode="lines", name="half a step of bf16", hoverinfo="skip",
                    line={"dash": "dot", "color": style.MUTED})
    fig.add_vline(x=HOPPER_BITS, line={"dash": "dot", "color": style.MUTED}, annotation_text="Hopper: about 14",
                  annotation_position="top left")
    fig.update_xaxes(title_text="bits the tensor core's accumulator keeps", dtick=2)
    fig.update_yaxes(type="log", title_text="relative error of the sum", exponentformat="power", dtick=1)
    at = list(bits).index(HOPPER_BITS)
    gain = errors["one accumulator"][at] / errors["registers"][at]
    return style.finish(
        fig, f"With {HOPPER_BITS} bits, promotion every {BLOCK} columns makes the sum {gain:.0f} times more exact",
        "modelled", f"sums cut after every {STEP} columns of K = {p.a.shape[1]}; bias as large as the product",
        height=440)
