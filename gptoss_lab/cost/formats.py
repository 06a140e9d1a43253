"""FP8 against packed MXFP4 expert weights on Hopper: which one pays, and from how many tokens on.

MXFP4 is about half the bytes, but Hopper cannot multiply it: it is unpacked to bf16 inside the kernel and runs at
half the FP8 rate. So while a step waits for memory MXFP4 wins, and once each expert sees enough tokens to be limited
by FLOPs FP8 wins. In between lies one crossing, because a packed step's FLOPs grow in proportion to the tokens while
the bytes of FP8 grow ever more slowly. It lies at thousands of tokens per pass for the 120B: prefill, never decode.
FP8 in decode is paid for with bytes per step and with the memory that KV would have had.

What is lost: a kernel that unpacks to fp8 has no such crossing (`mxfp4_unit='fp8'`), and unpacking itself costs time
that no bound shows.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.bounds import Bound, decode_bound, prefill_bound
from gptoss_lab.cost.errors import check_count
from gptoss_lab.cost.experts import expected_distinct_experts
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.parts import expert_bytes
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision

_EXPERT_PARTS = ("experts_gate_up", "experts_down")


@dataclass(frozen=True)
class FormatRow:
    """One decode step in both formats. Bytes are those of the experts' weights and of the whole step; seconds are
    bounds of the whole step, parts one after the other. fp8_over_mxfp4: above 1 the packed format is faster."""

    batch: int
    distinct_experts: float
    fp8_expert_bytes: float
    mxfp4_expert_bytes: float
    fp8_step_bytes: float
    mxfp4_step_bytes: float
    fp8_seconds: float
    mxfp4_seconds: float

    @property
    def fp8_over_mxfp4(self) -> float:
        """Ratio of the two step times."""
        return self.fp8_seconds / self.mxfp4_seconds


def expert_bytes_touched(config: ModelConfig, tokens: int, weight_format: str) -> float:
    """Expected expert weight bytes (scales and biases included) that a pass of `tokens` tokens reads, all layers."""
    return config.num_layers * expected_distinct_experts(config, tokens) * sum(expert_bytes(config, weight_format))


def format_table(
    config: ModelConfig, context_tokens: int, batches: Iterable[int], precision: Precision = FP8_EXPERTS,
    plan: Plan = SINGLE, hardware: Hardware = H200,
) -> list[FormatRow]:
    """One `FormatRow` per batch, for decode at `context_tokens`. `precision` gives everything but the experts."""
    rows = []
    for batch in batches:
        fp8, mxfp4 = (
            decode_bound(config, context_tokens, batch, replace(precision, experts=name), plan, hardware)
            for name in ("fp8", "mxfp4")
        )
        rows.append(FormatRow(
            batch, expected_distinct_experts(config, batch), _expert_bytes(fp8), _expert_bytes(mxfp4),
            _step_bytes(fp8), _step_bytes(mxfp4), fp8.sequential_seconds, mxfp4.sequential_seconds,
        ))
    return rows


def crossover_tokens(
    config: ModelConfig, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE, hardware: Hardware = H200,
    most: int = 131072,
) -> int | None:
    """Fewest tokens of a pass (batch x new tokens) from which on FP8 experts are faster than packed MXFP4 at their
    bounds; None if they are not up to `most` tokens (as when MXFP4 is unpacked to fp8)."""
    check_count("most", most, least=1)
    if not _fp8_wins(config, most, precision, plan, hardware):
        return None
    low, high = 0, most                     # FP8 loses at `low`, wins at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fp8_wins(config, middle, precision, plan, hardware) else (middle, high)
    return high


def _fp8_wins(config: ModelConfig, tokens: int, precision: Precision, plan: Plan, hardware: Hardware) -> bool:
    fp8, mxfp4 = (_expert_seconds(config, tokens, replace(precision, experts=name), plan, hardware)
                  for name in ("fp8", "mxfp4"))
    return fp8 < mxfp4


def _expert_seconds(
    config: ModelConfig, tokens: int, precision: Precision, plan: Plan, hardware: Hardware
) -> float:
    """Bound of the two expert products; which tokens belong to which sequence makes no difference to them."""
    limit = prefill_bound(config, 1, tokens, precision, plan, hardware)
    return sum(limit[name].seconds for name in _EXPERT_PARTS)


def _expert_bytes(limit: Bound) -> float:
    return sum(limit[name].part.weight_bytes for name in _EXPERT_PARTS)


def _step_bytes(limit: Bound) -> float:
    return sum(bound.part.memory_bytes for bound in limit.parts)
