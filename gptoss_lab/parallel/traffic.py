"""Which exchanges a plan needs, over which ranks, and how many bytes each rank receives for them.

Counted per token of a data-parallel group and averaged over its ranks, so that plans of the same world compare. The
sums are those that the exchanges really move (groups.Traffic counts them; a test compares): an all-reduce of N bytes
over p ranks brings 2 (p - 1) / p N to each, a gather or a reduce-scatter half of that.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.checkpoint.manifest import bytes_by_role, manifest
from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.plan import Plan, check
from gptoss_lab.parallel.rules import region_bytes
from gptoss_lab.parallel.share import Share

BF16 = 2


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange of a step.

    name: as the collectives call it. kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all". axis: over
    which ranks, "tp", "dp" or "world", `ranks` of them. times: in one step. token_bytes: received per token each time.
    sequence_bytes: at most received per sequence each time, whatever its length (the halo of a split sequence).
    """

    name: str
    kind: str
    axis: str
    ranks: int
    times: int
    token_bytes: float
    sequence_bytes: float = 0.0

    @property
    def step_bytes(self) -> float:
        """Bytes a rank receives per token in a whole step, halo apart."""
        return self.times * self.token_bytes


def exchanges(config: ModelConfig, plan: Plan, value_bytes: int = BF16, fast: bool = False) -> list[Exchange]:
    """The exchanges of one step under `plan`, those that move nothing left out. value_bytes: of an activation.

    Dispatch is the gathering kind. The sampler's few numbers per sequence are not listed. fast: of a prefill step of
    the fast forward, whose ranks have the whole embedding and route again what they gather; where they sum rows of
    their own (own_rows.py) two of them receive about three quarters of that.
    """
    check(config, plan)
    row, routing = config.hidden_size * value_bytes, 0 if fast else _routing_bytes(config, value_bytes)
    found = (_split(config, plan, row, routing, value_bytes) if plan.sequence_split
             else _heads(config, plan, row, routing))
    return [exchange for exchange in found if exchange.ranks > 1 and not (fast and exchange.name == "embedding")]


def _routing_bytes(config: ModelConfig, value_bytes: int) -> int:
    """Expert ids (int64) and weights (fp32 at least) that travel with a token."""
    return config.experts_per_token * (8 + max(4, value_bytes))


def _heads(config: ModelConfig, plan: Plan, row: int, routing: int) -> list[Exchange]:
    layers, dp, tp = config.num_layers, plan.dp, plan.tp
    sums = 2 * (tp - 1) / tp * row
    return [
        Exchange("embedding", "all-reduce", "tp", tp, 1, sums),
        Exchange("attention", "all-reduce", "tp", tp, layers, sums),
        Exchange("dispatch", "all-gather", "dp", dp, layers, (dp - 1) * (row + routing)),
        Exchange("combine", "reduce-scatter", "dp", dp, layers, (dp - 1) * row),
        Exchange("combine", "all-reduce", "tp", tp, layers, sums),
    ]


def _split(config: ModelConfig, plan: Plan, row: int, routing: int, value_bytes: int) -> list[Exchange]:
    layers, dp, tp, world = config.num_layers, plan.dp, plan.tp, plan.world
    sliding = sum(config.is_sliding(n) for n in range(layers))
    kv = 2 * config.kv_size * value_bytes
    from_others = dp - 1 / tp                           # rows of the world but the own T / tp, over T
    return [
        Exchange("embedding", "reduce-scatter", "tp", tp, 1, (tp - 1) / tp * row),
        Exchange("keys and values", "all-to-all", "tp", tp, layers - sliding, (tp - 1) / tp * kv),
        Exchange("keys and values", "all-to-all", "tp", tp, sliding, 0.0, 3 * (config.sliding_window - 1) * kv),
        Exchange("dispatch", "all-gather", "world", world, layers, from_others * (row + routing)),
        Exchange("combine", "reduce-scatter", "world", world, layers, from_others * row),
    ]


def read_bytes(config: ModelConfig, share: Share, layout: str = "fp8") -> int:
    """Bytes of its slices that a rank reads from a checkpoint of a layout with Hugging Face names."""
    return sum(region_bytes(spec, config, share) for spec in manifest(config, layout))


def read_bytes_by_role(config: ModelConfig, share: Share, layout: str = "fp8") -> dict[str, int]:
    """`read_bytes` by what they are: embedding, attention, expert weights, ..."""
    specs = manifest(config, layout)
    whole = bytes_by_role(specs)
    return {role: sum(region_bytes(s, config, share) for s in specs if s.role == role) for role in whole}


def kv_token_bytes(config: ModelConfig, plan: Plan, share: Share, value_bytes: int = BF16) -> int:
    """Bytes of keys and values that a rank keeps for one token of one of its sequences, in one layer."""
    heads = config.num_kv_heads if plan.sequence_split else len(share.kv_heads)
    return 2 * heads * config.head_dim * value_bytes
