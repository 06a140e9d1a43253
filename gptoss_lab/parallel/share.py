"""What one rank of a plan holds: its heads, experts, slices of experts and vocabulary rows, as ranges.

A `Place` says where a rank stands; in a real run the coordinates come from torch's device mesh (mesh.py). A `Share` is
the consequence, and everything else follows from it: which bytes are read (rules.py), which shapes the model has, what
must be summed over whom.

Biases that every rank would add are held by one: the output bias by tp index 0, an expert's down bias by slice 0, so a
plain sum over the ranks counts them once. Where a slice is empty the rank holds no experts at all.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.cuts import aligned_ranges, even_ranges
from gptoss_lab.parallel.errors import PlanError
from gptoss_lab.parallel.plan import Plan, check


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank: (dp, tp) in the mesh of the attention, (ep, slice) in the mesh of the experts."""

    dp: int
    tp: int
    ep: int
    slice: int


def place_of(plan: Plan, rank: int) -> Place:
    """Coordinates of rank number `rank`: both meshes are filled row by row. PlanError if there is no such rank."""
    if not 0 <= rank < plan.world:
        raise PlanError(f"rank {rank} is not one of the {plan.world} ranks of {plan}")
    return Place(*divmod(rank, plan.tp), *divmod(rank, plan.expert_slices))


@dataclass(frozen=True)
class Share:
    """What one rank holds, in global numbers.

    heads, kv_heads: attention heads. experts: ids. expert_rows: which part of each expert's intermediate axis (its
    gate/up rows are the pairs 2 i, 2 i + 1). vocabulary: rows of embedding and head. output_bias, down_bias: whether
    this rank adds the attention output's bias, and its experts' down biases. whole: everything is here.
    """

    heads: range
    kv_heads: range
    experts: range
    expert_rows: range
    vocabulary: range
    output_bias: bool = True
    down_bias: bool = True
    whole: bool = False


def share_of(config: ModelConfig, plan: Plan, place: Place | int) -> Share:
    """The share of a rank (its place or its number). PlanError if `plan` cannot cut this model."""
    check(config, plan)
    at = place_of(plan, place) if isinstance(place, int) else place
    ways, index = plan.head_ways, 0 if plan.sequence_split else at.tp
    rows = aligned_ranges(config.intermediate_size, plan.expert_slices)[at.slice]
    experts = even_ranges(config.num_experts, plan.ep)[at.ep]
    return Share(
        heads=even_ranges(config.num_heads, ways)[index],
        kv_heads=_kv_heads(config.num_kv_heads, ways, index),
        experts=experts if len(rows) else range(experts.start, experts.start),
        expert_rows=rows,
        vocabulary=even_ranges(config.vocab_size, plan.tp)[at.tp],
        output_bias=index == 0,
        down_bias=at.slice == 0,
        whole=plan.world == 1,
    )


def whole(config: ModelConfig) -> Share:
    """The share of a rank that is alone."""
    return share_of(config, Plan(), 0)


def shares(config: ModelConfig, plan: Plan) -> list[Share]:
    """The shares of all ranks, by rank."""
    return [share_of(config, plan, rank) for rank in range(plan.world)]


def _kv_heads(count: int, ways: int, index: int) -> range:
    """Key/value heads of one of `ways` ranks: a part each, or one head each that several ranks hold."""
    if ways <= count:
        return even_ranges(count, ways)[index]
    head = index // (ways // count)
    return range(head, head + 1)
