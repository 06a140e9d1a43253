"""Every tensor that a gpt-oss checkpoint must hold, derived from the config alone.

Four layouts: `original` (OpenAI's names, fused QKV), `hf` (the released Hugging Face names, q, k and v apart), `fp8`
(HF names, experts as e4m3 with a scale per 128x128 block) and `bf16` (HF names, experts dense). A reader compares a
folder with this list before it reads a tensor; the converter plans its output from it; `inspect` prints its totals.
Nothing here looks at a file, so the list is an independent statement of what is right.

Sources: shapes and names from the released index files and OpenAI's reference package; the sums equal the published
`total_size` of both checkpoints (13,761,264,768 and 65,248,815,744 bytes). FP8 names follow DeepSeek's checkpoints.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gptoss_lab.checkpoint.dtypes import ITEM_BYTES
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.config import ModelConfig

LAYOUTS = ("hf", "original", "fp8", "bf16")
EXPERTS_ORDERS = ("out_in", "in_out")
PROJECTIONS = ("gate_up_proj", "down_proj")
GROUP = 32          # MXFP4: values that share one scale byte
BLOCK = 128         # FP8: rows and columns that share one scale
ROLES = (
    "embedding", "unembedding", "attention", "sinks", "norms", "router", "expert weights", "expert scales",
    "expert biases",
)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: name, shape, dtype (its safetensors name, such as "BF16") and role (one of ROLES)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def numel(self) -> int:
        """Stored elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Model parameters held: two per byte of MXFP4 blocks, none in scales, else one per element."""
        if self.role == "expert scales" or self.name.endswith(".weight_scale_inv"):
            return 0
        return self.numel * (2 if self.role == "expert weights" and self.dtype == "U8" else 1)


def expert_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """(out, in) of one expert's matrix. projection: "gate_up_proj" (gate and up rows alternate) or "down_proj"."""
    if projection == "gate_up_proj":
        return 2 * config.intermediate_size, config.hidden_size
    if projection == "down_proj":
        return config.hidden_size, config.intermediate_size
    raise CheckpointError(f"no expert projection {projection!r}; one of {', '.join(PROJECTIONS)} is expected")


def manifest(
    config: ModelConfig, layout: str = "hf", *, attention_fp8: bool = False, experts_order: str = "out_in"
) -> tuple[TensorSpec, ...]:
    """Every tensor of one layout, in file order.

    layout: one of LAYOUTS. attention_fp8: with "fp8" only, the q, k, v and o weights are e4m3 too. experts_order: with
    "bf16" only, "out_in" ([E, out, in], names `...experts.gate_up_proj.weight`) or "in_out" ([E, in, out], names
    `...experts.gate_up_proj`, the in-memory form of transformers); the names differ because the shapes may not.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"no layout {layout!r}; one of {', '.join(LAYOUTS)} is expected")
    if experts_order not in EXPERTS_ORDERS:
        raise CheckpointError(f"no experts order {experts_order!r}; one of {', '.join(EXPERTS_ORDERS)} is expected")
    if attention_fp8 and layout != "fp8":
        raise CheckpointError(f"attention_fp8 belongs to the layout 'fp8', not {layout!r}")
    return tuple(_original(config) if layout == "original" else _hf(config, layout, attention_fp8, experts_order))


def layer_of(name: str) -> int | None:
    """The layer a tensor belongs to, None for embedding, unembedding and the final norm."""
    parts = name.split(".")
    place = {"model": 2, "block": 1}.get(parts[0])
    return int(parts[place]) if place and len(parts) > place and parts[place].isdecimal() else None


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of all tensors together, headers not counted."""
    return sum(spec.nbytes for spec in specs)


def bytes_by_role(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Bytes of each role, in the order of ROLES; roles that do not occur are left out."""
    sums = dict.fromkeys(ROLES, 0)
    for spec in specs:
        sums[spec.role] += spec.nbytes
    return {role: size for role, size in sums.items() if size}


def parameters_by_role(config: ModelConfig) -> dict[str, int]:
    """Parameters of each role."""
    sums = dict.fromkeys(ROLES, 0)
    for spec in manifest(config, "hf"):
        sums[spec.role] += spec.parameters
    return {role: count for role, count in sums.items() if count}


def count_parameters(config: ModelConfig) -> int:
    """All parameters: 20,914,757,184 and 116,829,156,672 for the released models."""
    return sum(parameters_by_role(config).values())


def count_active(config: ModelConfig) -> int:
    """Parameters one token meets: its experts only, without the input embedding (a look-up), as the model card
    counts.
    """
    roles = parameters_by_role(config)
    experts = roles["expert weights"] + roles["expert biases"]
    rest = sum(roles.values()) - experts - roles["embedding"]
    return rest + experts // config.num_experts * config.experts_per_token


# -- Hugging Face names ------------------------------------------------------------------------------------------------
def _hf(config: ModelConfig, layout: str, attention_fp8: bool, order: str) -> Iterator[TensorSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), "BF16", "embedding")
    for n in range(config.num_layers):
        yield from _hf_layer(config, f"model.layers.{n}.", layout, attention_fp8, order)
    yield TensorSpec("model.norm.weight", (hidden,), "BF16", "norms")
    yield TensorSpec("lm_head.weight", (vocab, hidden), "BF16", "unembedding")


def _hf_layer(
    config: ModelConfig, prefix: str, layout: str, attention_fp8: bool, order: str
) -> Iterator[TensorSpec]:
    hidden, experts = config.hidden_size, config.num_experts
    yield TensorSpec(prefix + "input_layernorm.weight", (hidden,), "BF16", "norms")
    shapes = {
        "q_proj": (config.q_size, hidden), "k_proj": (config.kv_size, hidden), "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
    }
    for projection, (rows, columns) in shapes.items():
        name = f"{prefix}self_attn.{projection}"
        if attention_fp8:
            yield from _fp8(name, (), rows, columns, "attention", "attention")
        else:
            yield TensorSpec(f"{name}.weight", (rows, columns), "BF16", "attention")
        yield TensorSpec(f"{name}.bias", (rows,), "BF16", "attention")
    yield TensorSpec(prefix + "self_attn.sinks", (config.num_heads,), "BF16", "sinks")
    yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), "BF16", "norms")
    yield TensorSpec(prefix + "mlp.router.weight", (experts, hidden), "BF16", "router")
    yield TensorSpec(prefix + "mlp.router.bias", (experts,), "BF16", "router")
    for projection in PROJECTIONS:
        yield from _hf_experts(config, f"{prefix}mlp.experts.{projection}", projection, layout, order)


def _hf_experts(config: ModelConfig, name: str, projection: str, layout: str, order: str) -> Iterator[TensorSpec]:
    experts, (rows, columns) = config.num_experts, expert_shape(config, projection)
    if layout == "hf":
        yield from _mxfp4(f"{name}_blocks", f"{name}_scales", experts, rows, columns)
    elif layout == "fp8":
        yield from _fp8(name, (experts,), rows, columns, "expert weights", "expert scales")
    elif order == "out_in":
        yield TensorSpec(f"{name}.weight", (experts, rows, columns), "BF16", "expert weights")
    else:
        yield TensorSpec(name, (experts, columns, rows), "BF16", "expert weights")
    yield TensorSpec(f"{name}_bias", (experts, rows), "BF16", "expert biases")


def _mxfp4(blocks: str, scales: str, experts: int, rows: int, columns: int) -> Iterator[TensorSpec]:
    groups = columns // GROUP
    yield TensorSpec(blocks, (experts, rows, groups, GROUP // 2), "U8", "expert weights")
    yield TensorSpec(scales, (experts, rows, groups), "U8", "expert scales")


def _fp8(
    name: str, lead: tuple[int, ...], rows: int, columns: int, role: str, scale_role: str
) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (*lead, rows, columns), "F8_E4M3", role)
    yield TensorSpec(f"{name}.weight_scale_inv", (*lead, -(-rows // BLOCK), -(-columns // BLOCK)), "F32", scale_role)


# -- OpenAI's names ----------------------------------------------------------------------------------------------------
def _original(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("embedding.weight", (vocab, hidden), "BF16", "embedding")
    for n in range(config.num_layers):
        yield from _original_layer(config, f"block.{n}.")
    yield TensorSpec("norm.scale", (hidden,), "BF16", "norms")
    yield TensorSpec("unembedding.weight", (vocab, hidden), "BF16", "unembedding")


def _original_layer(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, experts = config.hidden_size, config.num_experts
    yield TensorSpec(prefix + "attn.norm.scale", (hidden,), "BF16", "norms")
    yield TensorSpec(prefix + "attn.qkv.weight", (config.qkv_size, hidden), "BF16", "attention")
    yield TensorSpec(prefix + "attn.qkv.bias", (config.qkv_size,), "BF16", "attention")
    yield TensorSpec(prefix + "attn.sinks", (config.num_heads,), "BF16", "sinks")
    yield TensorSpec(prefix + "attn.out.weight", (hidden, config.q_size), "BF16", "attention")
    yield TensorSpec(prefix + "attn.out.bias", (hidden,), "BF16", "attention")
    yield TensorSpec(prefix + "mlp.norm.scale", (hidden,), "BF16", "norms")
    yield TensorSpec(prefix + "mlp.gate.weight", (experts, hidden), "BF16", "router")
    yield TensorSpec(prefix + "mlp.gate.bias", (experts,), "BF16", "router")
    for number, projection in enumerate(PROJECTIONS, start=1):
        rows, columns = expert_shape(config, projection)
        name = f"{prefix}mlp.mlp{number}"
        yield from _mxfp4(f"{name}_weight.blocks", f"{name}_weight.scales", experts, rows, columns)
        yield TensorSpec(f"{name}_bias", (experts, rows), "BF16", "expert biases")
