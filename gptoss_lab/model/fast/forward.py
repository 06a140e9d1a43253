"""The layers of the fast forward: the plain model's arithmetic in as few launches as its kernels allow.

A layer in prefill, with what each launch does:

    norm_residual       RMSNorm; x + output bias for later           (e4m3: RMSNorm and quantise, first layer alone)
    product             QKV with its bias
    rope_cache          split, turn, into the pages
    attention           with the sink                                (e4m3: and quantise, before it stores)
    product             output projection, accumulated onto x + bias (e4m3: with its bias onto x)
    moe_layer           6: route 2 (3 above 8,192 tokens), quantise 1, products 2, combine with the residual 1
                                                                     (e4m3: combine gives the next layer's norm too)

Up to 32 tokens, in decode, the norm is part of the QKV product and bias and residual of the output projection, in both
forms of the weights: one launch each (gptoss_kernels.projection.few). Attention that writes no e4m3 (of more rows in
decode, or another's kernel) is followed by a launch that quantises.

Nothing here asks the device for a value, so the same function is captured for decode. A layer of a prompt adds its
attention to the residual stream in place, where nobody else holds it; its experts write a new one.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.functional import embedding, linear

from gptoss_kernels.moe import NormInto
from gptoss_kernels.projection import MOST_TOKENS, RowPlan, fp8_linear_align, row_plan
from gptoss_kernels.quant import Quantised, empty_quantised
from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies, rope_table
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.fast.operations import FastOperations
from gptoss_lab.model.fast.step import AnyStep
from gptoss_lab.model.fast.weights import FastLayer, FastWeights, Projection
from gptoss_lab.model.paged import PagePool

Observe = Callable[[str, int, torch.Tensor], None]
_row_plan = lru_cache(maxsize=4)(row_plan)                   # the next step often has as many rows; nobody writes there


class Forward:
    """Embedding, layers and head over a pool of pages, of a rank that holds everything; ranks.py has the others.

    whole_heads: all heads are here, so the output projection can add its bias and the residual itself.
    """

    whole_heads = True

    def __init__(self, weights: FastWeights, pool: PagePool, operations: FastOperations) -> None:
        self.weights, self.pool, self.operations = weights, pool, operations
        self.heads = weights.layers[0].sinks.shape[0]
        self.cos, self.sin = rope_tables(weights.config, weights.device)
        self._norm, self._rope = operations.norm_residual.function, operations.rope_cache.function
        self._fp8, self._few = operations.fp8_linear.function, operations.few_linear.function
        self._moe = operations.moe_layer.function
        self._rounds = operations.fp8_linear.backend != "reference"              # that one multiplies rows as they are
        self._ahead: tuple[torch.Tensor, torch.Tensor | Quantised] | None = None     # rows, and their norm made already

    def rows(self, tokens: int) -> RowPlan | None:
        """How `tokens` rows lie in tiles, where the projections need to know."""
        if self.weights.projections == "dense" or tokens <= MOST_TOKENS:
            return None
        align = fp8_linear_align(self.operations.fp8_linear.backend, tokens)
        return _row_plan(tokens, align, self.weights.device)

    def hidden(self, ids: torch.Tensor, step: AnyStep, observe: Observe | None = None) -> torch.Tensor:
        """ids [T] int64 -> [T, H], what enters the final norm. observe("moe_input", layer, x [T, H]) if given."""
        self._ahead = None
        x = embedding(ids, self.weights.embedding)                               # [T, H]
        for n, layer in enumerate(self.weights.layers):
            x = self._attention(x, layer, n, step)
            if observe is not None:
                observe("moe_input", n, x)
            x = self._experts(x, layer, n, step)
        return x

    def head(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, H] -> logits [R, V] in the model's dtype, and the normed rows [R, H] that they were read from."""
        normed, _ = self._norm(x.contiguous(), self.weights.norm, None, self.weights.config.rms_norm_eps)
        return linear(normed, self.weights.unembedding), normed

    def _attention(self, x: torch.Tensor, layer: FastLayer, n: int, step: AnyStep) -> torch.Tensor:
        """x [T, H] -> x + attention [T, H]."""
        qkv, base = self._qkv(x, layer, step)                                    # [T, (Hq + 2 Hkv) D]
        kind, k_pages, v_pages = step.kind(layer.sliding), self.pool.keys[n], self.pool.values[n]
        scales = None if self.pool.key_scales is None else (self.pool.key_scales[n], self.pool.value_scales[n])
        keys, values = (kind.buffers(pages, x.dtype, scale) for pages, scale in
                        zip((k_pages, v_pages), scales or (None, None), strict=True))
        q = self._rope(qkv, step.positions, self.cos, self.sin, k_pages, v_pages, kind.slots, heads=self.heads,
                       scales=scales, rows=kind.rows, keys=keys, values=values)  # [T, Hq, D]
        room = self._room(len(x), layer.out.weight.shape[1], step)
        if keys is None:
            out = kind.plan.run(q, k_pages, v_pages, layer.sinks, out=room, scales=scales)
        else:
            out = kind.plan.run(q, keys, values, layer.sinks, out=room)
        return self._join(base, out, layer.out, step)

    def _room(self, tokens: int, columns: int, step: AnyStep) -> Quantised | None:
        """Room in e4m3 for what a projection takes next, to the end of its last tile; None where it takes no e4m3."""
        if tokens <= MOST_TOKENS or self.weights.projections != "fp8" or not self._rounds:
            return None
        return empty_quantised(step.rows.rows, columns, self.weights.device)

    def _qkv(self, x: torch.Tensor, layer: FastLayer, step: AnyStep) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed rows' QKV, and what the output projection is added onto: x, with that one's bias where a dense
        product accumulates onto it."""
        eps = self.weights.config.rms_norm_eps
        if x.shape[0] <= MOST_TOKENS:
            qkv = self._few(x, layer.qkv.weight, layer.qkv.bias, scale_inv=layer.qkv.scale_inv,
                            norm_weight=layer.attention_norm, eps=eps)
            return qkv, x
        if layer.qkv.scale_inv is not None:
            made = self._made_ahead(x)
            qkv = self._fp8(x if made is None else made, layer.qkv.weight, layer.qkv.scale_inv, layer.qkv.bias,
                            step.rows, layer.attention_norm if made is None else None, eps, dtype=x.dtype)
            return qkv, x
        normed, base = self._norm(x, layer.attention_norm, layer.out.bias if self.whole_heads else None, eps)
        return linear(normed, layer.qkv.weight, layer.qkv.bias), x if base is None else base

    def _made_ahead(self, x: torch.Tensor) -> torch.Tensor | Quantised | None:
        """The norm of x, if what wrote x made it too; once."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] is x else None

    def _join(
        self, base: torch.Tensor, heads: torch.Tensor | Quantised, out: Projection, step: AnyStep
    ) -> torch.Tensor:
        """base [T, H] + output projection of heads [T, Hq, D], or of e4m3 rows in `_room`; for more than a few rows
        base is written over."""
        heads = flat(heads)
        if base.shape[0] <= MOST_TOKENS:
            return self._few(heads, out.weight, out.bias, scale_inv=out.scale_inv, residual=base)
        if out.scale_inv is not None:
            return self._fp8(heads, out.weight, out.scale_inv, out.bias, step.rows, out=base, add=True,
                             dtype=base.dtype)
        return torch.addmm(base, heads, out.weight.t(), out=base)                # in place: no copy of base

    def _experts(self, x: torch.Tensor, layer: FastLayer, n: int, step: AnyStep) -> torch.Tensor:
        """x [T, H] -> x + experts [T, H]."""
        norm = self._next_norm(n, x, step)
        out = self._moe(x, layer.moe, num_tokens=step.live, norm=norm)
        self._ahead = None if norm is None else (out, norm.into)
        return out

    def _next_norm(self, n: int, x: torch.Tensor, step: AnyStep) -> NormInto | None:
        """The norm that follows layer n's experts and room for it, where the next QKV product takes rows in e4m3."""
        weights, room = self.weights, None
        if n + 1 < len(weights.layers):
            room = self._room(*x.shape, step)
        if room is None:
            return None
        return NormInto(weights.layers[n + 1].attention_norm, weights.config.rms_norm_eps, room)


def flat(heads: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
    """heads [T, Hq, D] as [T, Hq D]; rows in e4m3 lie so already."""
    return heads if isinstance(heads, Quantised) else heads.flatten(1)


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position the model has, each [P, D / 2] fp32, the concentration included."""
    rope = config.rope
    omega = rope_frequencies(config.head_dim, rope.theta, rope.factor, rope.beta_fast, rope.beta_slow,
                             rope.original_context, rope.truncate).to(torch.float32).to(device)
    positions = torch.arange(config.max_position_embeddings, device=device)
    cos, sin = rope_table(positions, omega, rope_concentration(rope.factor))
    return cos.contiguous(), sin.contiguous()
