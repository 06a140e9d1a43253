"""From a checkpoint on disk to a `Transformer` on a device: every tensor read once, straight to where it stays.

On the CPU a tensor that already has the wanted dtype stays the reader's memory map, so a bf16 model is read as it is
touched and takes no memory of its own. On a GPU the bytes go from the file through a pinned buffer to the device, and
are turned there into the wanted dtype. Experts are kept as the file has them ("stored": MXFP4 codes or e4m3 blocks,
decoded one expert at a time when used) or decoded once ("dense"). The experts of 20B are 10 GB in MXFP4, 19 GB in FP8
and 38 GB in bf16; dense ones are quicker, so "auto" takes them while they are small.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_lab.checkpoint import Dense, Fp8, Mxfp4, Stored, open_checkpoint
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.collectives import Collectives, OneRank
from gptoss_lab.model.operations import choose_operations
from gptoss_lab.model.transformer import Transformer
from gptoss_lab.parallel.share import Share
from gptoss_lab.parallel.source import ShardedSource

DENSE_LIMIT = 4 * 2**30
"""Bytes of all experts in dense form up to which expert_storage="auto" means "dense"."""


class Source(Protocol):
    """What a model is filled from; `checkpoint.open_checkpoint` returns one. device None: as memory-mapped."""

    config: ModelConfig

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """The tensor with this Hugging Face name, in its stored dtype, whatever the layout of the file."""
        ...

    def linear(self, name: str, device: torch.device | None = None) -> Dense | Fp8:
        """A linear weight outside the experts; `name` without ".weight"."""
        ...

    def experts(self, layer: int, projection: str, *, device: torch.device | None = None) -> Stored:
        """The matrices [E, out, in] of a layer's experts here; projection is "gate_up_proj" or "down_proj"."""
        ...


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    expert_storage: str = "auto",
    router_dtype: torch.dtype | None = None,
    backends: Mapping[str, str] | None = None,
    collectives: Collectives | None = None,
    share: Share | None = None,
) -> Transformer:
    """Load a checkpoint folder: the Hugging Face or the original layout, its bf16 or its FP8 conversion.

    dtype: of the residual stream, the linear layers and the cache (bf16, fp32; fp64 for tests). expert_storage:
    "stored", "dense" or "auto" (dense up to 4 GiB). router_dtype: in which router logits and expert weights are
    computed and rounded, fp32 by default; torch.bfloat16 does what OpenAI's code does. backends: operation -> backend
    (see operations.py). share, collectives: what of the model this rank holds, and how it reaches the others
    (`gptoss_lab.parallel`); only that share is read.
    Errors: CheckpointError; ValueError for a storage that does not exist; BackendUnavailable.
    """
    checkpoint = open_checkpoint(path)
    return build_model(
        checkpoint if share is None else ShardedSource(checkpoint, share), device, dtype,
        expert_storage=expert_storage, router_dtype=router_dtype, backends=backends, collectives=collectives,
        share=share,
    )


def build_model(
    source: Source,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    expert_storage: str = "auto",
    router_dtype: torch.dtype | None = None,
    backends: Mapping[str, str] | None = None,
    collectives: Collectives | None = None,
    share: Share | None = None,
) -> Transformer:
    """As `load_model`, from anything that is a `Source`; with a share, from a source of that share's slices."""
    if share is not None and not share.whole and (collectives is None or isinstance(collectives, OneRank)):
        raise ValueError("a share of a model needs the collectives of its plan; there are none to sum its parts")
    router_dtype = torch.promote_types(dtype, torch.float32) if router_dtype is None else router_dtype
    filler = _Filler(source, torch.device(device), dtype, router_dtype, expert_storage)
    model = Transformer(
        source.config, choose_operations(device, dtype, filler.form, backends), dtype=dtype, router_dtype=router_dtype,
        expert_form=filler.form, device=device, collectives=collectives, share=share,
    )
    model.load_state_dict(filler.state(), strict=True, assign=True)
    return model.requires_grad_(False).eval()


class _Filler:
    """Gathers the tensors of a source under the names that `Transformer` gives them, on the device, in their dtypes."""

    def __init__(
        self, source: Source, device: torch.device, dtype: torch.dtype, router_dtype: torch.dtype, storage: str
    ) -> None:
        self.source, self.device, self.dtype, self.router_dtype = source, device, dtype, router_dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.read_to = None if device.type == "cpu" else device
        self.dense = _is_dense(source.config, dtype, storage)
        self.form = "dense" if self.dense else _matrices(source.experts(0, "down_proj")).form

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model."""
        state = {
            "embedding.weight": self.source.tensor("model.embed_tokens.weight", self.read_to),
            "norm.weight": self.get("model.norm.weight", self.wide),
            "unembedding.weight": self.get("lm_head.weight", self.dtype),
        }
        for n in range(self.source.config.num_layers):
            layer = self.attention(n) | self.router(n) | self.experts(n)
            state |= {f"layers.{n}.{name}": value for name, value in layer.items()}
        return state

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor in another dtype; the same memory if it has that dtype."""
        return self.source.tensor(name, self.read_to).to(dtype)

    def attention(self, n: int) -> dict[str, torch.Tensor]:
        """Norm, fused QKV (rows of Q, K, V one after the other), output projection, sinks."""
        place = f"model.layers.{n}.self_attn"
        rows = [self.source.linear(f"{place}.{x}_proj", self.read_to).dequantise(self.dtype) for x in "qkv"]
        biases = [self.get(f"{place}.{x}_proj.bias", self.dtype) for x in "qkv"]
        out = self.source.linear(f"{place}.o_proj", self.read_to)
        return {
            "attention_norm.weight": self.get(f"model.layers.{n}.input_layernorm.weight", self.wide),
            "attention.qkv.weight": torch.cat(rows),
            "attention.qkv.bias": torch.cat(biases),
            "attention.out.weight": out.dequantise(self.dtype),
            "attention.out.bias": self.get(f"{place}.o_proj.bias", self.dtype),
            "attention.sinks": self.get(f"{place}.sinks", self.wide),
        }

    def router(self, n: int) -> dict[str, torch.Tensor]:
        """Norm and router."""
        place = f"model.layers.{n}"
        return {
            "moe_norm.weight": self.get(f"{place}.post_attention_layernorm.weight", self.wide),
            "moe.router.weight": self.get(f"{place}.mlp.router.weight", self.router_dtype),
            "moe.router.bias": self.get(f"{place}.mlp.router.bias", self.router_dtype),
        }

    def experts(self, n: int) -> dict[str, torch.Tensor]:
        """Both projections of all experts, decoded or as stored, and their biases."""
        state = {}
        for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            stored = self.source.experts(n, theirs, device=self.read_to)
            kept = ExpertMatrices("dense", _decoded(stored, self.dtype)) if self.dense else _matrices(stored)
            if kept.form != self.form:
                raise ValueError(f"layer {n}: {theirs} is stored as {kept.form}, layer 0 as {self.form}; "
                                 "the experts of all layers must be stored alike")
            state[f"moe.{ours}.values"] = kept.values
            if kept.scales is not None:
                state[f"moe.{ours}.scales"] = kept.scales
            state[f"moe.{ours}.bias"] = self.get(f"model.layers.{n}.mlp.experts.{theirs}_bias", self.dtype)
        return state


def _is_dense(config: ModelConfig, dtype: torch.dtype, storage: str) -> bool:
    """Whether the experts are decoded at load; "auto" decides by their size."""
    if storage not in ("auto", "stored", "dense"):
        raise ValueError(f"expert_storage is {storage!r}; 'auto', 'stored' or 'dense'")
    weights = config.num_layers * config.num_experts * 3 * config.hidden_size * config.intermediate_size
    return storage == "dense" or (storage == "auto" and weights * dtype.itemsize <= DENSE_LIMIT)


def _matrices(stored: Stored) -> ExpertMatrices:
    """What the reader found, as the operation "moe" takes it."""
    if isinstance(stored, Mxfp4):
        return ExpertMatrices("mxfp4", stored.blocks, stored.scales)
    if isinstance(stored, Dense):
        return ExpertMatrices("dense", stored.out_in())
    if stored.first_row or stored.first_column:
        raise ValueError(f"experts were cut at row {stored.first_row} and column {stored.first_column} of a block; "
                         "stored FP8 experts must be cut at multiples of 128")
    return ExpertMatrices("fp8", stored.weight, stored.scale_inv)


def _decoded(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """All experts as [E, out, in]. The reader decodes MXFP4 to fp32 or bf16; fp32 is exact for any other dtype."""
    direct = dtype if dtype == torch.bfloat16 or isinstance(stored, Dense) else torch.float32
    return stored.dequantise(direct).to(dtype)
