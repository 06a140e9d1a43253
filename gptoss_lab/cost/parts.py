"""FLOPs and bytes of every part of one pass, on the fullest GPU of a plan.

A pass is a list of parts, from the embedding to the head, each summed over its layers. A part has the FLOPs of its
matrix products on one kind of tensor core, the weight and KV bytes that must cross the memory bus once, and the bytes
that must cross NVLink. Nothing here is about time; `bounds` divides by rates.

Counting rules. A multiply-add is 2 FLOP; norms, RoPE, softmax and activation run on other units and count 0.
Attention counts the pairs the mask keeps, not the tiles a kernel visits. A weight is read once per pass; of the
experts only those that some token picks, in expectation (`experts`). KV already in the cache is read once and new KV
written once; in a sliding layer that is at most the window. Inputs and outputs of a part are listed as
`activation_bytes` but are not part of `memory_bytes`: in decode they stay in the L2 cache and in prefill they hide
behind FLOPs, so a bound without them is one.

Collectives follow the TP-only scheme: activations in bf16, replicated inside a TP group. All-reduce of N bytes over p
ranks moves 2 (p-1)/p N through each, the least possible without arithmetic in the switch. The experts' inputs are
gathered from the other DP groups (dispatch); their outputs are summed over the world and each DP group keeps its own
tokens (combine). The sampler works on sharded logits, which are not gathered. What this engine moves instead is counted
in `exchanges`; rows in e4m3 are fewer bytes than this least in bf16.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.experts import expected_distinct_experts
from gptoss_lab.cost.plan import SINGLE, Plan, Shares, shares
from gptoss_lab.cost.precision import BF16_BYTES, FP8_EXPERTS, Precision, kv_value_bytes, matrix_bytes
from gptoss_lab.cost.workload import Workload, full_pairs, window_pairs


@dataclass(frozen=True)
class Part:
    """One part of a pass, over all its layers, on one GPU. unit: 'bf16' or 'fp8', the tensor core of its `flop`."""

    name: str
    unit: str = "bf16"
    flop: float = 0
    weight_bytes: float = 0
    kv_bytes: float = 0
    activation_bytes: float = 0
    link_bytes: float = 0

    @property
    def memory_bytes(self) -> float:
        """Bytes that must cross the GPU's memory bus: weights and KV."""
        return self.weight_bytes + self.kv_bytes


def forward_parts(
    config: ModelConfig, work: Workload, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE
) -> tuple[Part, ...]:
    """All parts of one pass in the order they run, for the fullest GPU of `plan`.

    CostError if the sequence is longer than the model allows or `plan` cannot cut the model.
    """
    if work.total_tokens > config.max_position_embeddings:
        raise CostError(
            f"{work.total_tokens} tokens exceed the {config.max_position_embeddings} positions of {config.name}")
    share = shares(config, plan)
    local = -(-work.sequences // plan.dp)               # sequences of the fullest DP group
    rows = local * work.new_tokens                      # token rows of its attention
    everyone = work.sequences * work.new_tokens         # token rows of the experts: all groups together
    return (
        _embedding(config, rows, share, plan),
        _all_reduce("embedding_all_reduce", 1, rows, config.hidden_size, plan.tp),
        _norms(config, rows),
        _projection("qkv_projection", config, precision, rows, _qkv_rows(config, share), config.hidden_size),
        _attention("attention_window", config, precision, work, local, share, sliding=True),
        _attention("attention_full", config, precision, work, local, share, sliding=False),
        _projection("output_projection", config, precision, rows, config.hidden_size, share.heads * config.head_dim),
        _all_reduce("attention_all_reduce", config.num_layers, rows, config.hidden_size, plan.tp),
        _router(config, everyone),
        _dispatch(config, everyone, (work.sequences // plan.dp) * work.new_tokens),
        _experts("experts_gate_up", config, precision, everyone, share),
        _experts("experts_down", config, precision, everyone, share),
        _combine(config, everyone, rows, plan),
        _head(config, local * work.sampled_tokens, share),
    )


def total(parts: Iterable[Part], quantity: str) -> float:
    """Sum over `parts` of one number of `Part`, such as 'flop', 'weight_bytes', 'memory_bytes' or 'link_bytes'."""
    return sum(getattr(part, quantity) for part in parts)


def _qkv_rows(config: ModelConfig, share: Shares) -> int:
    return (share.heads + 2 * share.kv_heads) * config.head_dim


def _embedding(config: ModelConfig, rows: int, share: Shares, plan: Plan) -> Part:
    row_bytes = config.hidden_size * BF16_BYTES
    return Part("embedding", weight_bytes=rows * row_bytes / plan.tp, activation_bytes=rows * row_bytes)


def _norms(config: ModelConfig, rows: int) -> Part:
    count = 2 * config.num_layers + 1
    vector_bytes = config.hidden_size * BF16_BYTES
    return Part("norms", weight_bytes=count * vector_bytes, activation_bytes=2 * count * rows * vector_bytes)


def _projection(name: str, config: ModelConfig, precision: Precision, rows: int, out: int, in_: int) -> Part:
    layers = config.num_layers
    return Part(
        name,
        unit=precision.dense,
        flop=layers * 2 * rows * out * in_,
        weight_bytes=layers * (matrix_bytes(precision.dense, out, in_) + BF16_BYTES * out),
        activation_bytes=layers * rows * (in_ + out) * BF16_BYTES,
    )


def _attention(
    name: str, config: ModelConfig, precision: Precision, work: Workload, sequences: int, share: Shares, sliding: bool
) -> Part:
    layers = sum(config.is_sliding(layer) == sliding for layer in range(config.num_layers))
    if sliding:
        window = config.sliding_window
        pairs = window_pairs(work, window)
        touched = min(work.cached_tokens, window - 1) + min(work.new_tokens, window)
    else:
        pairs = full_pairs(work)
        touched = work.total_tokens
    kv_token_bytes = 2 * share.kv_heads * config.head_dim * kv_value_bytes(precision.kv)
    return Part(
        name,
        flop=layers * sequences * 4 * share.heads * config.head_dim * pairs,
        weight_bytes=layers * share.heads * BF16_BYTES,                                 # the sinks
        kv_bytes=layers * sequences * touched * kv_token_bytes,
        activation_bytes=layers * sequences * work.new_tokens * 2 * share.heads * config.head_dim * BF16_BYTES,
    )


def _router(config: ModelConfig, rows: int) -> Part:
    layers, experts, hidden = config.num_layers, config.num_experts, config.hidden_size
    return Part(
        "router",
        flop=layers * 2 * rows * experts * hidden,
        weight_bytes=layers * experts * (hidden + 1) * BF16_BYTES,
        activation_bytes=layers * rows * (hidden + experts) * BF16_BYTES,
    )


def expert_bytes(config: ModelConfig, weight_format: str, rows: int | None = None) -> tuple[int, int]:
    """Bytes of (gate/up, down) of one expert with scales and bf16 biases. rows: length of the slice of the expert axis
    (None: the whole expert); the down bias is held by every slice."""
    rows = config.intermediate_size if rows is None else rows
    gate_up = matrix_bytes(weight_format, 2 * rows, config.hidden_size) + BF16_BYTES * 2 * rows
    down = matrix_bytes(weight_format, config.hidden_size, rows) + BF16_BYTES * config.hidden_size
    return gate_up, down


def _experts(name: str, config: ModelConfig, precision: Precision, rows: int, share: Shares) -> Part:
    first = name == "experts_gate_up"
    held = share.experts / config.num_experts
    touched = held * expected_distinct_experts(config, rows)
    routed = held * rows * config.experts_per_token
    width = (2 if first else 1) * share.expert_rows
    one_expert = expert_bytes(config, precision.experts, share.expert_rows)[0 if first else 1]
    return Part(
        name,
        unit=precision.expert_unit,
        flop=config.num_layers * 2 * routed * width * config.hidden_size,
        weight_bytes=config.num_layers * touched * one_expert,
        activation_bytes=config.num_layers * routed * (config.hidden_size + share.expert_rows) * BF16_BYTES,
    )


def _head(config: ModelConfig, rows: int, share: Shares) -> Part:
    return Part(
        "head",
        flop=2 * rows * share.vocab_rows * config.hidden_size,
        weight_bytes=share.vocab_rows * config.hidden_size * BF16_BYTES if rows else 0,
        activation_bytes=rows * (config.hidden_size + share.vocab_rows) * BF16_BYTES,
    )


def _all_reduce(name: str, times: int, rows: int, hidden: int, ranks: int) -> Part:
    return Part(name, link_bytes=times * 2 * (ranks - 1) / ranks * rows * hidden * BF16_BYTES)


def _dispatch(config: ModelConfig, everyone: int, own_at_least: int) -> Part:
    arriving = everyone - own_at_least                  # at the emptiest DP group, which waits for the most rows
    return Part("dispatch", link_bytes=config.num_layers * arriving * config.hidden_size * BF16_BYTES)


def _combine(config: ModelConfig, everyone: int, own: int, plan: Plan) -> Part:
    reduce_rows = everyone * (plan.world - 1) / plan.world
    gather_rows = own * (plan.tp - 1) / plan.tp
    row_bytes = config.hidden_size * BF16_BYTES
    return Part("combine", link_bytes=config.num_layers * (reduce_rows + gather_rows) * row_bytes)
