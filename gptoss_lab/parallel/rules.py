"""Sharding rules: which region of every tensor of a checkpoint a share needs.

A region is one range per axis of the tensor *as it is stored*, so MXFP4 groups, FP8 blocks and dense experts of either
order have their own translation of the same cut, and a reader can fetch exactly those bytes. A cut inside an expert
starts at a multiple of 128, so it never divides a group of 32, a block of 128 or an activation group. A cut of an FP8
attention weight may: then the scales of every block that it touches are part of the region (see stored.Fp8).
"""
from __future__ import annotations

import math
from collections.abc import Iterator

from gptoss_lab.checkpoint.dtypes import ITEM_BYTES
from gptoss_lab.checkpoint.manifest import BLOCK, GROUP, TensorSpec
from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.share import Share

Region = tuple[range, ...]


def region(name: str, shape: tuple[int, ...], config: ModelConfig, share: Share) -> Region:
    """The part of the tensor `name` (a Hugging Face name of any layout) of stored shape `shape` that `share` needs.

    A rank that needs nothing of it gets an empty first range.
    """
    full = [range(n) for n in shape]
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return share.vocabulary, full[1]
    if ".self_attn." in name:
        return _attention(name.rsplit(".self_attn.", 1)[1], full, config, share)
    if ".mlp.experts." in name:
        return _experts(name.rsplit(".mlp.experts.", 1)[1], full, config, share)
    return tuple(full)                                          # norms and router: every rank has all of them


def region_bytes(spec: TensorSpec, config: ModelConfig, share: Share) -> int:
    """Bytes of a share's region of one tensor."""
    return math.prod(map(len, region(spec.name, spec.shape, config, share))) * ITEM_BYTES[spec.dtype]


def cut_names(share: Share) -> Iterator[str]:
    """One line per thing that a share holds, to print."""
    yield f"query heads {_span(share.heads)}"
    yield f"key/value heads {_span(share.kv_heads)}"
    yield f"experts {_span(share.experts)}"
    yield f"rows {_span(share.expert_rows)} of each expert"
    yield f"vocabulary rows {_span(share.vocabulary)}"


def _attention(part: str, full: list[range], config: ModelConfig, share: Share) -> Region:
    if part == "sinks":
        return (share.heads,)
    projection, _, kind = part.partition(".")
    queries = _scaled(share.heads, config.head_dim)
    if projection == "o_proj":
        if kind == "bias":
            return (full[0] if share.output_bias else range(0),)
        return full[0], _blocks(queries) if kind == "weight_scale_inv" else queries
    rows = queries if projection == "q_proj" else _scaled(share.kv_heads, config.head_dim)
    return (_blocks(rows) if kind == "weight_scale_inv" else rows, *full[1:])


def _experts(part: str, full: list[range], config: ModelConfig, share: Share) -> Region:
    """part: gate_up_proj or down_proj, then _blocks, _scales, _bias, .weight, .weight_scale_inv or nothing (in_out)."""
    gate_up = part.startswith("gate_up_proj")
    kind = part.removeprefix("gate_up_proj" if gate_up else "down_proj")
    inside = _scaled(share.expert_rows, 2) if gate_up else share.expert_rows
    if kind == "_bias":
        experts = share.experts if gate_up or share.down_bias else range(share.experts.start, share.experts.start)
        return (experts, inside if gate_up else full[1])
    if kind == ".weight_scale_inv":
        inside = _blocks(inside)
    elif kind in ("_blocks", "_scales") and not gate_up:
        inside = range(inside.start // GROUP, -(-inside.stop // GROUP))
    axis = 1 if gate_up else 2
    if kind == "":                                              # [E, in, out]
        axis = 3 - axis
    return tuple(share.experts if n == 0 else inside if n == axis else whole for n, whole in enumerate(full))


def _scaled(span: range, by: int) -> range:
    return range(span.start * by, span.stop * by)


def _blocks(span: range) -> range:
    """The 128-blocks that positions `span` touch."""
    first = span.start // BLOCK
    return range(first, max(first, -(-span.stop // BLOCK)) if len(span) else first)


def _span(span: range) -> str:
    return f"{span.start}..{span.stop - 1}" if len(span) else "none"
