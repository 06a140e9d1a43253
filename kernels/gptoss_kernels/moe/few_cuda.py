"""The experts of one token (or of each of a few) as two launches of our own for Hopper (`cuda/few_experts.cu`).

Why beside the decode form of the grouped GEMM: that cuts the weights into tiles of 256 rows, since its first product
has a whole scale group of the result in one CTA. For one token these are 92 tiles on 132 multiprocessors, each waiting
for the launches that choose and place. Here work is cut into 16 or 8 rows, every CTA reads the router's logits and
chooses for itself, and the weighted sum over the experts happens in the second product: a layer is the logits and two
launches. What lies between the products is f16. Every token reads the weights of its experts anew, so it is for very
few tokens.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.quant import Quantised

if TYPE_CHECKING:
    from gptoss_kernels.moe.layer import LayerWeights

ROWS, THREADS = (16, 8), (32, 256)
"""Of a CTA, in each part."""
MOST_TOKENS = 1
"""Up to so many tokens this form is the faster one."""
TUNED = ((8, 16), (4, 3))
"""Of each part: chunks of weights that a lane asks for at once, and CTAs that share a multiprocessor."""


def few_defines(part: int, hidden: int, inner: int, experts: int, top: int, *, alpha: float = 1.702,
                limit: float = 7.0, tuned: tuple[int, int] | None = None) -> tuple[tuple[str, object], ...]:
    """The compile-time constants of a part of `few_experts.cu`: 0, gate and up with SwiGLU; 1, down and the sum.

    hidden: H. inner: I. experts: of the router. tuned: as in TUNED.
    """
    asked, resident = tuned or TUNED[part]
    n, k = ((2 * inner, hidden), (hidden, inner))[part]
    return (("PART", part), ("N", n), ("K", k), ("EXPERTS", experts), ("TOP", top), ("ALPHA", f"{float(alpha)!r}f"),
            ("LIMIT", f"{float(limit)!r}f"), ("ASKED", asked), ("RESIDENT", resident))


@functools.cache
def _kernel(part: int, hidden: int, inner: int, experts: int, top: int, alpha: float, limit: float, device: int
            ) -> driver.Kernel:
    return driver.load("few_experts.cu", "few_experts", few_defines(part, hidden, inner, experts, top, alpha=alpha,
                                                                    limit=limit), device)


def few_experts(
    x: torch.Tensor, logits: torch.Tensor, quantised: Quantised, weights: LayerWeights, *, residual: bool = True,
    num_tokens: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[x +] the weighted sum of each token's experts, chosen from the router's logits: [T, H] bf16.

    x: [T, H] bf16, the residual stream. logits: [T, E] fp32, softmax over the chosen ones. quantised: [T, H], x after
    the norm. weights: with FP8 experts; experts that are not among them add nothing. num_tokens: [1] int32 on the
    device, rows that are real: the others get no expert. out: [T, H] bf16, not x itself. The launch before this one
    must be what wrote `logits` and `quantised`, and must not be what wrote x. H and I in multiples of 64 up to 4096.
    ValueError.
    """
    w, (t, h) = weights, x.shape
    e, inner, here = w.router.shape[0], w.gate_up_bias.shape[1] // 2, w.gate_up_bias.shape[0]
    if h % 64 or inner % 64 or max(h, inner) > 4096 or x.dtype != torch.bfloat16 or w.gate_up.form != "fp8":
        raise ValueError(f"few_experts: rows of {h} {x.dtype}, {w.gate_up.form} experts of {inner}; bf16, fp8 and "
                         "multiples of 64 up to 4096 are needed")
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
    kernels = [_kernel(part, h, inner, e, w.experts_per_token, w.alpha, w.limit, x.device.index or 0)
               for part in (0, 1)]
    pairs, real, held = t * w.experts_per_token, 0 if num_tokens is None else num_tokens, (w.first_expert, here)
    chosen = torch.empty(pairs, inner, dtype=torch.float16, device=x.device)
    driver.launch(kernels[0], pairs * (2 * inner // ROWS[0]), THREADS[0], [
        logits, real, *quantised, *quantised.scale.stride(), w.gate_up.values, w.gate_up.scales, w.gate_up_bias,
        chosen, *held], overlapping=True)
    driver.launch(kernels[1], t * (h // ROWS[1]), THREADS[1], [
        logits, real, chosen, w.down.values, w.down.scales, w.down_bias, x if residual else 0, out, *held],
        overlapping=True)
    return out


def takes(tokens: int, weights: LayerWeights, precision: dict[str, object]) -> bool:
    """Whether a layer of so many tokens can go this way, and is then faster. precision: logits_dtype and weight_dtype
    of `routing.route`, which this form leaves at their defaults."""
    return (tokens <= MOST_TOKENS and weights.gate_up.form == "fp8"
            and all(kept == torch.float32 for kept in precision.values()))
