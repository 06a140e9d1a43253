"""Self-attention of one layer: fused QKV, rotary positions, attention with sinks, output projection."""
from __future__ import annotations

import torch
from torch import nn

from gptoss_lab.model.collectives import Collectives
from gptoss_lab.model.operations import Operations
from gptoss_lab.model.step import Step


class Attention(nn.Module):
    """Grouped-query attention with a learned sink per query head, sliding (window) or full (window None).

    qkv: [Hq D + 2 Hkv D, H] and bias, rows in the order Q, K, V. out: [H, Hq D] and bias. sinks: [Hq] fp32.
    heads and kv_heads are those of this rank; query head h reads key/value head h // (heads / kv_heads).
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None,
        operations: Operations,
        collectives: Collectives,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, window, head_dim
        self.split = (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(hidden_size, sum(self.split) * head_dim, dtype=dtype)
        self.out = nn.Linear(heads * head_dim, hidden_size, dtype=dtype)
        self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
        self._rope, self._attention = operations.rope.function, operations.sink_attention.function
        self._collectives = collectives

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [T, H] normed -> [T, H], to be added to the residual stream. Extends the caches of `step`."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))                 # [T, Hq + 2 Hkv, D]
        turned = self._rope(qkv[:, : self.split[0] + self.split[1]], step.cos, step.sin)
        q, k = turned.split(self.split[:2], dim=1)                           # [T, Hq, D], [T, Hkv, D]
        v = qkv[:, -self.split[2] :]                                         # [T, Hkv, D]
        keys, values, key_offsets = step.extend(self.layer, k, v)
        out, lse = self._attention(
            q, keys, values, self.sinks, cu_seqlens_q=step.offsets, cu_seqlens_k=key_offsets, window=self.window,
        )
        if step.observe is not None:
            step.observe("sink_mass", self.layer, torch.exp(self.sinks - lse))
        return self._collectives.reduce_attention(self.out(out.flatten(1)))  # [T, Hq D] -> [T, H]

    def extra_repr(self) -> str:
        seen = "full" if self.window is None else f"window={self.window}"
        return f"heads={self.split[0]}, kv_heads={self.split[1]}, head_dim={self.head_dim}, {seen}"
