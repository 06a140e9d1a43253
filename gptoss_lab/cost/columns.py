"""What one pass asks of every kind of kernel: seconds at the datasheet's rates, and how often something is started.

A measured time is explained as a sum: each kind of kernel takes its share of the bound, stretched by a factor that says
how far the kernel is from the datasheet, and each start costs a latency. So a pass is a dictionary of amounts, the
columns of a linear fit (`fit`), whose coefficients are the factors (1 would be the datasheet) and the latencies in
seconds. One factor and one latency make an efficiency curve: x / (latency + factor x) rises with the size x.

Kernels of different weight formats are different kernels, with columns of their own; what one format reaches says
nothing about another. The expert products have two columns each, FLOPs and weight bytes, because neither hides the
other wholly: with few rows per expert a grouped product waits for weights between tiles. FLOPs of packed MXFP4 are
counted at the FP8 rate; the factor says what the unpacking makes of it. The weights of experts are those of the fullest
rank: all wait for it in every layer.

Links are counted as the engine moves (`exchanges`): `link` are the bytes of its sums over TP ranks, `link_gathers`
those of a library's gathers between data-parallel groups, and `collectives` and `gathers` how many of each. A system
that sums whole rows where this engine keeps own ones (own_rows=False) has `link_one_shot` beside `link`: every rank
reads the rows of every other. A collective costs a latency, and perhaps more for every rank beyond two to wait for.
`activations` are the hidden states that norms and residual additions read and write; what a product reads and writes
belongs to its own factor.

What is lost: a factor does not depend on the plan. A kernel that is worse at an eighth of the heads is not known here
until rows show it. Where ranks keep own rows all of `activations` is cut among them; a rank with slices of all experts
still places and combines every row, one with whole experts only its share of those.
"""
from __future__ import annotations

from dataclasses import replace

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import exchanges
from gptoss_lab.cost.bounds import bound
from gptoss_lab.cost.experts import expected_distinct_experts, expected_fullest_experts
from gptoss_lab.cost.hardware import H200, Hardware
from gptoss_lab.cost.parts import forward_parts
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import BF16_BYTES, FP8_EXPERTS, WEIGHT_FORMATS, Precision
from gptoss_lab.cost.workload import Workload

PROJECTIONS = ("projections_bf16", "projections_fp8")
EXPERTS = tuple(f"experts_{form}" for form in WEIGHT_FORMATS)
EXPERT_WEIGHTS = tuple(f"expert_weights_{form}" for form in WEIGHT_FORMATS)
FACTORS = (
    *PROJECTIONS, *EXPERTS, *EXPERT_WEIGHTS, "attention_full", "attention_window", "activations", "link",
    "link_one_shot", "link_gathers",
)
LATENCIES = (
    "projection_launches", "attention_launches", "expert_launches", "layers", "collectives",
    "gathers", "collectives_by_extra_rank", "passes",
)
COLUMNS = FACTORS + LATENCIES
LEAST = {name: 1.0 for name in (*PROJECTIONS, "attention_full", "attention_window")}
"""Factors that cannot be smaller: nothing beats the datasheet. The others may hide behind one another."""
_PRODUCTS = ("qkv_projection", "output_projection")
_EXPERTS = ("experts_gate_up", "experts_down")


def columns(
    config: ModelConfig, work: Workload, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200, own_rows: bool = True,
) -> dict[str, float]:
    """The amount of every column of COLUMNS in one pass: seconds for FACTORS, counts for LATENCIES.

    own_rows: whether ranks keep own rows of a long prompt where this engine does; False for a system that never does.
    """
    work = exchanges.stepped(work, plan)
    limit = bound(forward_parts(config, work, replace(precision, mxfp4_unit="fp8"), plan), hardware)
    layers, amounts = config.num_layers, dict.fromkeys(COLUMNS, 0.0)
    rows, everyone = -(-work.sequences // plan.dp) * work.new_tokens, work.sequences * work.new_tokens
    own = own_rows and exchanges.keeps_own_rows(plan, precision, rows)
    amounts["projections_bf16"] = limit["router"].seconds / (plan.tp if own else 1) + limit["head"].seconds
    amounts[f"projections_{precision.dense}"] += sum(limit[name].seconds for name in _PRODUCTS)
    amounts[f"experts_{precision.experts}"] = sum(limit[name].compute_seconds for name in _EXPERTS)
    amounts[f"expert_weights_{precision.experts}"] = (
        sum(limit[name].memory_seconds for name in _EXPERTS) * _fullest_over_mean(config, everyone, plan))
    one_shot = 0.0 if own else exchanges.one_shot_bytes(config, plan, rows)
    normed = exchanges.normed_rows(config, plan, rows, everyone, own)
    return amounts | {
        "attention_full": limit["attention_full"].seconds,
        "attention_window": limit["attention_window"].seconds,
        "activations": 2 * normed * config.hidden_size * BF16_BYTES / hardware.memory_bytes_per_second,
        "link": exchanges.sum_bytes(config, plan, rows, own) / hardware.link_bytes_per_second,
        "link_one_shot": one_shot / hardware.link_bytes_per_second,
        "link_gathers": exchanges.gather_bytes(config, plan, rows) / hardware.link_bytes_per_second,
        "projection_launches": 2 * layers,
        "attention_launches": layers,
        "expert_launches": layers * (expert_launches(everyone, precision.experts) + (plan.dp > 1)),
        "layers": layers,
        "collectives": exchanges.sum_count(config, plan, own),
        "gathers": exchanges.gather_count(config, plan),
        "collectives_by_extra_rank": 2 * layers * (max(0, plan.tp - 2) + max(0, plan.dp - 2)),
        "passes": 1,
    }


def expert_launches(rows: int, weight_format: str) -> int:
    """Launches of one MoE layer (kernels/gptoss_kernels/moe/layer.py): routing 2, products 2, combine 1; above 8 rows
    one more places them; one row with FP8 experts takes 3 in all. An addition behind a gather is not among them."""
    if rows == 1 and weight_format == "fp8":
        return 3
    return 5 if rows <= 8 else 6


def _fullest_over_mean(config: ModelConfig, rows: int, plan: Plan) -> float:
    """Experts touched on the fullest of the ep groups of ranks, over what a group of its size has in the mean."""
    mean = expected_distinct_experts(config, rows) * -(-config.num_experts // plan.ep) / config.num_experts
    return expected_fullest_experts(config, rows, plan.ep) / mean
