"""What fits into the GPUs of a plan, and how much of it is left for KV.

Weights are counted as stored, whether or not a step reads them. KV is counted for two engines: one that keeps only the
last `window` positions of a sliding layer in a ring (half of the layers then cost a constant), and one that keeps every
position of every layer. Of a 131,072-token sequence the second holds twice as much.

What is lost: page rounding of the full layers, and everything that is neither weight nor KV (context, graphs,
workspaces, logits), for which `reserved_bytes` is set aside: an assumption to be replaced by what the engine reports.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import CostError, check_count
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.parts import expert_bytes
from gptoss_lab.cost.plan import SINGLE, Plan, shares
from gptoss_lab.cost.precision import BF16_BYTES, FP8_EXPERTS, Precision, kv_value_bytes, matrix_bytes

RESERVED_BYTES = 4 * 2**30


def weight_bytes_per_gpu(config: ModelConfig, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE) -> int:
    """Bytes of all weights, scales and biases on the fullest GPU. One GPU: the size of the checkpoint's tensors."""
    share = shares(config, plan)
    hidden, q_rows = config.hidden_size, share.heads * config.head_dim
    qkv_rows = q_rows + 2 * share.kv_heads * config.head_dim
    projections = (
        matrix_bytes(precision.dense, qkv_rows, hidden) + matrix_bytes(precision.dense, hidden, q_rows)
        + BF16_BYTES * (qkv_rows + hidden)
    )
    router = BF16_BYTES * config.num_experts * (hidden + 1)
    small = BF16_BYTES * (2 * hidden + share.heads)                     # two norms and the sinks
    experts = share.experts * sum(expert_bytes(config, precision.experts, share.expert_rows))
    vocabulary = 2 * share.vocab_rows * hidden * BF16_BYTES
    return config.num_layers * (projections + router + small + experts) + vocabulary + BF16_BYTES * hidden


def kv_bytes(config: ModelConfig, tokens: int, kv: str = "bf16", window_ring: bool = True) -> int:
    """KV bytes of one sequence of `tokens` tokens, all layers and heads together.

    kv: 'bf16' or 'fp8'. window_ring: sliding layers keep only their window (True), or every position (False).
    """
    return _kv_bytes(config, tokens, config.num_kv_heads, kv, window_ring)


def kv_bytes_per_gpu(
    config: ModelConfig, tokens: int, sequences: int = 1, kv: str = "bf16", plan: Plan = SINGLE,
    window_ring: bool = True,
) -> int:
    """KV bytes of `sequences` sequences (of the whole replica) of `tokens` tokens on the fullest GPU of `plan`."""
    local = -(-check_count("sequences", sequences) // plan.dp)
    return local * _kv_bytes(config, tokens, shares(config, plan).kv_heads, kv, window_ring)


@dataclass(frozen=True)
class MemoryFit:
    """Bytes on the fullest GPU. free_bytes: what is left when weights, KV and the reserve are taken; negative if they
    do not fit."""

    capacity_bytes: float
    weight_bytes: int
    kv_bytes: int
    reserved_bytes: int

    @property
    def kv_room_bytes(self) -> float:
        """Bytes that KV may take."""
        return self.capacity_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def free_bytes(self) -> float:
        """What remains of the room after the KV asked for; negative when it does not fit."""
        return self.kv_room_bytes - self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether everything finds room."""
        return self.free_bytes >= 0

    @property
    def reason(self) -> str:
        """One line: the sum, and whether it fits."""
        asked = " + ".join(
            f"{name} {size / 1e9:.1f}"
            for name, size in (("weights", self.weight_bytes), ("KV", self.kv_bytes), ("reserve", self.reserved_bytes))
        )
        return f"{asked} GB {'fits in' if self.fits else 'does not fit in'} {self.capacity_bytes / 1e9:.1f} GB"


def memory_fit(
    config: ModelConfig, tokens: int, sequences: int = 1, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200, window_ring: bool = True, reserved_bytes: int = RESERVED_BYTES,
) -> MemoryFit:
    """Whether `sequences` sequences of `tokens` tokens fit beside the weights, with all the numbers."""
    return MemoryFit(
        capacity_bytes=hardware.memory_bytes,
        weight_bytes=weight_bytes_per_gpu(config, precision, plan),
        kv_bytes=kv_bytes_per_gpu(config, tokens, sequences, precision.kv, plan, window_ring),
        reserved_bytes=check_count("reserved_bytes", reserved_bytes),
    )


def max_sequences(
    config: ModelConfig, tokens: int, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200, window_ring: bool = True, reserved_bytes: int = RESERVED_BYTES,
) -> int:
    """Most sequences of `tokens` tokens that the replica can hold at once; 0 if not even the weights fit."""
    check_count("tokens", tokens, least=1)
    room = memory_fit(config, 0, 0, precision, plan, hardware, window_ring, reserved_bytes).kv_room_bytes
    one = kv_bytes_per_gpu(config, tokens, 1, precision.kv, plan, window_ring)
    return plan.dp * max(0, int(room // one))


def _kv_bytes(config: ModelConfig, tokens: int, kv_heads: int, kv: str, window_ring: bool) -> int:
    check_count("tokens", tokens)
    if tokens > config.max_position_embeddings:
        raise CostError(f"{tokens} tokens exceed the {config.max_position_embeddings} positions of {config.name}")
    position_bytes = 2 * kv_heads * config.head_dim * kv_value_bytes(kv)
    kept = min(tokens, config.sliding_window) if window_ring else tokens
    return sum(kept if config.is_sliding(n) else tokens for n in range(config.num_layers)) * position_bytes
