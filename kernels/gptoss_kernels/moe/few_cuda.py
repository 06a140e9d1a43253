"""The experts of one token (or of each of a few) as two launches of our own for Hopper: `cuda/few_experts.cu` for e4m3
weights, `cuda/few_packed.cu` for MXFP4.

Why beside the decode form of the grouped GEMM: that cuts the weights into tiles of 256 rows, since its first product
has a whole scale group of the result in one CTA. For one token these are 92 tiles on 132 multiprocessors, each waiting
for the launches that choose and place. Here work is cut into 16 or 8 rows, every CTA reads the router's logits and
chooses for itself, and the weighted sum over the experts happens in the second product: a layer is the logits and two
launches. What lies between the products is f16. Every token reads the weights of its experts anew, so it is for very
few tokens.

Why two kernels: e4m3 rows go from memory straight to the registers of many small CTAs, and nothing delays them. MXFP4
codes need more instructions than bytes of time, so rows come to shared memory by themselves, for all warps of one CTA a
multiprocessor. Each kernel was the slower one with the other's weights.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.quant import Quantised

if TYPE_CHECKING:
    from gptoss_kernels.moe.layer import LayerWeights

ROWS = (16, 8)
"""Of an expert, that a CTA takes at once, in each part."""
MOST_TOKENS = {"fp8": 2, "mxfp4": 1}
"""Up to so many tokens this way is the faster one, by form of the weights."""
MOST_EXPERTS = {"fp8": 16, "mxfp4": 4}
"""Of a token."""


class Asking(NamedTuple):
    """`few_experts.cu`: warps of a CTA, chunks of weights that a lane asks for at once, CTAs of a multiprocessor."""

    warps: int
    asked: int
    resident: int

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps


class Teams(NamedTuple):
    """`few_packed.cu`: teams of a CTA, warps of a team, products whose rows are on their way at once."""

    teams: int
    members: int
    stages: int

    @property
    def threads(self) -> int:
        """Of a CTA: the teams', and the warp that loads."""
        return 32 * (self.teams * self.members + 1)


Tuning = Asking | Teams
TUNED: dict[str, tuple[Tuning, Tuning]] = {
    "fp8": (Asking(1, 12, 12), Asking(8, 5, 3)), "mxfp4": (Teams(4, 4, 4), Teams(2, 8, 4))}
"""By form of the weights, of each part."""


def few_source(form: str) -> str:
    """The file of a form of the weights; its kernel has the same name."""
    return {"fp8": "few_experts.cu", "mxfp4": "few_packed.cu"}[form]


def few_defines(part: int, form: str, hidden: int, inner: int, experts: int, top: int, *, alpha: float = 1.702,
                limit: float = 7.0, tuned: Tuning | None = None) -> tuple[tuple[str, object], ...]:
    """The compile-time constants of a part of `few_source(form)`: 0, gate and up with SwiGLU; 1, down and the sum.

    hidden: H. inner: I. experts: of the router. tuned: of the form's class; default TUNED's.
    """
    n, k = ((2 * inner, hidden), (hidden, inner))[part]
    chosen = (tuned or TUNED[form][part])._asdict().items()
    return (("PART", part), ("N", n), ("K", k), ("EXPERTS", experts), ("TOP", top), ("ALPHA", f"{float(alpha)!r}f"),
            ("LIMIT", f"{float(limit)!r}f"), *((name.upper(), value) for name, value in chosen))


@functools.cache
def _kernel(part: int, form: str, hidden: int, inner: int, experts: int, top: int, alpha: float, limit: float,
            device: int) -> driver.Kernel:
    source = few_source(form)
    return driver.load(source, source.removesuffix(".cu"), few_defines(part, form, hidden, inner, experts, top,
                                                                       alpha=alpha, limit=limit), device)


def few_experts(
    x: torch.Tensor, logits: torch.Tensor, quantised: Quantised, weights: LayerWeights, *, residual: bool = True,
    num_tokens: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[x +] the weighted sum of each token's experts, chosen from the router's logits: [T, H] bf16.

    x: [T, H] bf16, the residual stream. logits: [T, E] fp32, softmax over the chosen ones. quantised: [T, H], x after
    the norm. weights: with FP8 or MXFP4 experts; those that are not among them add nothing. num_tokens: [1] int32 on
    the device, rows that are real: the others get no expert. out: [T, H] bf16, not x itself. The launch before this one
    must be what wrote `logits` and `quantised`, and must not be what wrote x. H and I in multiples of 64 up to 4096, at
    most MOST_EXPERTS of a token, weights that begin at a multiple of 16 bytes. ValueError.
    """
    w, (t, h) = weights, x.shape
    e, inner, here = w.router.shape[0], w.gate_up_bias.shape[1] // 2, w.gate_up_bias.shape[0]
    form, top = w.gate_up.form, w.experts_per_token
    if h % 64 or inner % 64 or max(h, inner) > 4096 or x.dtype != torch.bfloat16 or form not in TUNED:
        raise ValueError(f"few_experts: rows of {h} {x.dtype}, {form} experts of {inner}; bf16, fp8 or mxfp4 and "
                         "multiples of 64 up to 4096 are needed")
    if top > MOST_EXPERTS[form]:
        raise ValueError(f"few_experts: {top} {form} experts of a token; at most {MOST_EXPERTS[form]} are taken")
    held = (w.gate_up.values, w.gate_up.scales, w.down.values, w.down.scales)
    if any(m.data_ptr() % 16 or not m.is_contiguous() for m in held):
        raise ValueError("few_experts: weights or scales do not begin at a multiple of 16 bytes or are not contiguous; "
                         "all must")
    if logits.shape != (t, e) or logits.dtype != torch.float32 or not (logits.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"few_experts: logits are {logits.dtype} {list(logits.shape)}; contiguous fp32 {[t, e]} are "
                         "needed, and x contiguous")
    if quantised.values.shape != (t, h) or not quantised.values.is_contiguous():
        raise ValueError(f"few_experts: quantised rows are {list(quantised.values.shape)}; contiguous {[t, h]} are "
                         "needed")
    out = torch.empty_like(x) if out is None else out
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous() or out.data_ptr() == x.data_ptr():
        raise ValueError(f"few_experts: out is {out.dtype} {list(out.shape)}; contiguous bf16 {[t, h]} that is not x "
                         "is needed")
    device = x.device.index or 0
    kernels = [_kernel(part, form, h, inner, e, top, w.alpha, w.limit, device) for part in (0, 1)]
    tiles, more = (top * (2 * inner // ROWS[0]), h // ROWS[1]), ((), ())
    if form == "mxfp4":                                                 # a CTA goes through many tiles
        tiles = [min(n, gemm_cuda.multiprocessors(device)) for n in tiles]
        more = [(n,) for n in tiles]
    real, place = 0 if num_tokens is None else num_tokens, (w.first_expert, here)
    chosen = torch.empty(t * top, inner, dtype=torch.float16, device=x.device)
    driver.launch(kernels[0], t * tiles[0], TUNED[form][0].threads, [
        logits, real, *quantised, *quantised.scale.stride(), *held[:2], w.gate_up_bias, chosen, *place, *more[0]],
        overlapping=True)
    driver.launch(kernels[1], t * tiles[1], TUNED[form][1].threads, [
        logits, real, chosen, *held[2:], w.down_bias, x if residual else 0, out, *place, *more[1]], overlapping=True)
    return out


def takes(tokens: int, weights: LayerWeights, precision: dict[str, object]) -> bool:
    """Whether a layer of so many tokens can go this way, and is then faster. precision: logits_dtype and weight_dtype
    of `routing.route`, which this form leaves at their defaults."""
    form = weights.gate_up.form
    return (tokens <= MOST_TOKENS.get(form, 0) and weights.experts_per_token <= MOST_EXPERTS[form]
            and all(kept == torch.float32 for kept in precision.values()))
