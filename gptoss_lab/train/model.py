"""gpt-oss with gradients: the arithmetic of gptoss_lab.model over a packed batch, on the compact vocabulary.

The modules of gptoss_lab.model are made to serve: weights as stored, operations by backend, caches. Training needs the
same function with gradients, in one piece. RMSNorm, rotary positions, routing and SwiGLU are the reference operations
themselves, which are plain torch; attention and experts are forms of this package that are equal to theirs. Weights are
fp32 and are cast where they are used, so the arithmetic is that of the served model in its dtype, bf16 residual stream
included. `stored` puts every weight through its file form (quantise.py).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gptoss_kernels.reference.moe import route, swiglu
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.rope import apply_rope, rope_concentration, rope_frequencies, rope_table
from gptoss_lab.config import ModelConfig
from gptoss_lab.train.attention import Attend
from gptoss_lab.train.experts import balance_loss, expert_layer
from gptoss_lab.train.quantise import stored_value, straight_through

SINK = 4.0
"""Where sinks begin. At 0 a sink has 1 % of a fresh head's softmax over a dialogue and hardly a gradient; here 20 %, so
that heads learn with it in place.
"""


@dataclass(frozen=True)
class Pointwise:
    """The operations that are not products: plain, or each compiled to one kernel."""

    rms_norm: Callable[..., torch.Tensor] = rms_norm
    apply_rope: Callable[..., torch.Tensor] = apply_rope
    swiglu: Callable[..., torch.Tensor] = swiglu

    @classmethod
    def compiled(cls, device: torch.device) -> tuple[Pointwise, str]:
        """(compiled with torch.compile, "compiled"), or (plain, why it does not compile here)."""
        found = cls(*(torch.compile(f, dynamic=True) for f in (rms_norm, apply_rope, swiglu)))
        x = torch.randn(64, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        heads, turn = x.unflatten(1, (4, 8)), torch.ones(64, 4, device=device)
        try:
            values = found.rms_norm(x, torch.ones(32, device=device), 1e-5), found.apply_rope(heads, turn, turn)
            sum(v.float().sum() for v in (*values, found.swiglu(x, 1.702, 7.0))).backward()
        except (RuntimeError, OSError, ImportError) as error:
            return cls(), f"not compiled: {type(error).__name__}: {str(error)[:200]}"
        return found, "compiled"


class TrainedModel(nn.Module):
    """A gpt-oss model of any config on `rows` vocabulary rows, the last of which stands for `others` tokens.

    Parameters, all fp32: embedding, unembedding [rows, H]; norm [H]; and for each layer n `layers.n.`: attention_norm,
    moe_norm [H]; qkv [Q + 2 KV, H], qkv_bias; out [H, Q], out_bias; sinks [Hq]; router [E, H], router_bias; gate_up
    [E, 2 I, H], gate_up_bias; down [E, H, I], down_bias. dtype: of the arithmetic. stored: see the module's text.
    """

    def __init__(
        self, config: ModelConfig, rows: int, others: int, *, dtype: torch.dtype = torch.float32, seed: int = 0,
        pointwise: Pointwise | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.stored = config, dtype, False
        self.pointwise = Pointwise() if pointwise is None else pointwise
        generator = torch.Generator().manual_seed(seed)
        h = config.hidden_size
        self.embedding = _normal(generator, 1.0, rows, h)
        self.unembedding = _normal(generator, 0.5 / math.sqrt(h), rows, h)
        self.norm = nn.Parameter(torch.ones(h))
        self.layers = nn.ModuleList(_layer(config, generator) for _ in range(config.num_layers))
        r = config.rope
        offset = torch.zeros(rows)
        offset[-1] = math.log(others)
        self.register_buffer("offset", offset, persistent=False)
        self.register_buffer("frequencies", rope_frequencies(
            config.head_dim, r.theta, r.factor, r.beta_fast, r.beta_slow, r.original_context, r.truncate,
        ), persistent=False)

    @property
    def wide(self) -> torch.dtype:
        """Of router and logits: fp32, or fp64 for tests."""
        return torch.promote_types(self.dtype, torch.float32)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter as it is used: in its stored form if `stored`; still fp32."""
        parameter = self.get_parameter(name)
        return straight_through(name, parameter) if self.stored else parameter

    @torch.no_grad()
    def store(self) -> None:
        """Give every parameter its stored value for good; after training, so that nothing is rounded at each use."""
        for name, parameter in self.named_parameters():
            parameter.copy_(stored_value(name, parameter))
        self.stored = False

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [T] row numbers -> [T, H]."""
        return functional.embedding(rows, self.weight("embedding")).to(self.dtype)

    def forward(
        self, rows: torch.Tensor, positions: torch.Tensor, attend: Attend,
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rows, positions: [T] int64. attend: see attention.py. observe: called with the chosen experts [T, k] of each
        layer. Returns hidden [T, H] after the final norm, and the mean balance loss of the layers, fp32.
        """
        x = self.embed(rows)                                                          # [T, H]
        rope = rope_table(positions, self.frequencies, rope_concentration(self.config.rope.factor))
        balance = x.new_zeros((), dtype=torch.float32)
        for n in range(self.config.num_layers):
            x = x + self._attention(n, self._norm(x, f"layers.{n}.attention_norm"), rope, attend)
            update, even = self._moe(n, self._norm(x, f"layers.{n}.moe_norm"), observe)
            x, balance = x + update, balance + even
        return self._norm(x, "norm"), balance / self.config.num_layers

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, H] -> [N, rows] fp32; the last entry has log(others) added, so a softmax is the full one."""
        return functional.linear(hidden, self.weight("unembedding").to(self.dtype)).to(self.wide) + self.offset

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, rows] of `logits` -> [N]: the row of the likeliest token; the shared row counts as one token here."""
        return (logits - self.offset).argmax(dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.pointwise.rms_norm(x, self.weight(name), self.config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weight(name).to(x.dtype), self.weight(f"{name}_bias").to(x.dtype))

    def _attention(
        self, n: int, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        c = self.config
        qkv = self._linear(x, f"layers.{n}.qkv").unflatten(-1, (-1, c.head_dim))      # [T, Hq + 2 Hkv, D]
        turned = self.pointwise.apply_rope(qkv[:, : c.num_heads + c.num_kv_heads], *rope)
        q, k = turned.split((c.num_heads, c.num_kv_heads), dim=1)
        window = c.sliding_window if c.is_sliding(n) else None
        out = attend(n, q, k, qkv[:, -c.num_kv_heads :], self.weight(f"layers.{n}.sinks"), window)
        return self._linear(out.flatten(1), f"layers.{n}.out")                        # [T, Hq D] -> [T, H]

    def _moe(
        self, n: int, x: torch.Tensor, observe: Callable[[torch.Tensor], None] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, place = self.config, f"layers.{n}"
        logits = self._linear(x.to(self.wide), f"{place}.router")                     # [T, E]
        ids, weights = route(logits, c.experts_per_token, self.wide)
        if observe is not None:
            observe(ids)
        names = ("gate_up", "gate_up_bias", "down", "down_bias")
        update = expert_layer(
            x, ids, weights, *(self.weight(f"{place}.{name}").to(self.dtype) for name in names),
            alpha=c.swiglu_alpha, limit=c.swiglu_limit, swiglu=self.pointwise.swiglu,
        )
        return update, balance_loss(logits, ids)


def _layer(config: ModelConfig, generator: torch.Generator) -> nn.ParameterDict:
    """Weights of deviation 1 / sqrt(in); what writes to the residual stream is smaller by sqrt(2 L). Sinks: SINK."""
    h, i, e = config.hidden_size, config.intermediate_size, config.num_experts
    wide, small = 1 / math.sqrt(h), 1 / math.sqrt(2 * config.num_layers)
    return nn.ParameterDict({
        "attention_norm": torch.ones(h),
        "qkv": _normal(generator, wide, config.qkv_size, h),
        "qkv_bias": torch.zeros(config.qkv_size),
        "out": _normal(generator, small / math.sqrt(config.q_size), h, config.q_size),
        "out_bias": torch.zeros(h),
        "sinks": torch.full((config.num_heads,), SINK),
        "moe_norm": torch.ones(h),
        "router": _normal(generator, wide, e, h),
        "router_bias": torch.zeros(e),
        "gate_up": _normal(generator, wide, e, 2 * i, h),
        "gate_up_bias": torch.zeros(e, 2 * i),
        "down": _normal(generator, small / math.sqrt(i), e, h, i),
        "down_bias": torch.zeros(e, h),
    })


def _normal(generator: torch.Generator, deviation: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=generator) * deviation)
