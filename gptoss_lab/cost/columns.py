"""What one pass asks of every kind of kernel: seconds at the datasheet's rates, and how often something is started.

A measured time is explained as a sum: each kind of kernel takes its share of the bound, stretched by a factor that says
how far the kernel is from the datasheet, and each start costs a latency. So a pass is a dictionary of amounts, the
columns of a linear fit (`fit`), whose coefficients are the factors (1 would be the datasheet) and the latencies in
seconds. One factor and one latency make an efficiency curve: x / (latency + factor x) rises with the size x.

Kernels of different weight formats are different kernels, with columns of their own; what one format reaches says
nothing about another. The expert products have two columns each, FLOPs and weight bytes, because neither hides the
other wholly: with few rows per expert a grouped product waits for weights between tiles. FLOPs of packed MXFP4 are
counted at the FP8 rate; the factor says what the unpacking makes of it. Links have two columns as well: the least bytes
that an all-reduce can move, and those of the one-shot form, in which every rank reads the rows of every other.
`activations` are the hidden states that norms and residual additions read and write; what a product reads and writes
belongs to its own factor. A collective costs a latency, and perhaps more for every rank beyond two to wait for.

What is lost: a factor does not depend on the plan. A kernel that is worse at an eighth of the heads is not known here
until rows show it.
"""
from __future__ import annotations

from dataclasses import replace

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.bounds import bound
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
    "link_one_shot",
)
LATENCIES = (
    "projection_launches", "attention_launches", "expert_launches", "layers", "collectives",
    "collectives_by_extra_rank", "passes",
)
COLUMNS = FACTORS + LATENCIES
LEAST = {name: 1.0 for name in (*PROJECTIONS, "attention_full", "attention_window")}
"""Factors that cannot be smaller: nothing beats the datasheet. The others may hide behind one another."""
_PRODUCTS = ("qkv_projection", "output_projection")
_EXPERTS = ("experts_gate_up", "experts_down")


def columns(
    config: ModelConfig, work: Workload, precision: Precision = FP8_EXPERTS, plan: Plan = SINGLE,
    hardware: Hardware = H200,
) -> dict[str, float]:
    """The amount of every column of COLUMNS in one pass: seconds for FACTORS, counts for LATENCIES."""
    limit = bound(forward_parts(config, work, replace(precision, mxfp4_unit="fp8"), plan), hardware)
    layers, amounts = config.num_layers, dict.fromkeys(COLUMNS, 0.0)
    amounts["projections_bf16"] = limit["router"].seconds + limit["head"].seconds
    amounts[f"projections_{precision.dense}"] += sum(limit[name].seconds for name in _PRODUCTS)
    amounts[f"experts_{precision.experts}"] = sum(limit[name].compute_seconds for name in _EXPERTS)
    amounts[f"expert_weights_{precision.experts}"] = sum(limit[name].memory_seconds for name in _EXPERTS)
    gathered = (plan.dp > 1) + (plan.tp > 1) + (plan.world > 1)         # dispatch, attention's all-reduce, combine
    return amounts | {
        "attention_full": limit["attention_full"].seconds,
        "attention_window": limit["attention_window"].seconds,
        "activations": limit["norms"].part.activation_bytes / hardware.memory_bytes_per_second,
        "link": limit.link_seconds,
        "link_one_shot": _one_shot_bytes(config, work, plan) / hardware.link_bytes_per_second,
        "projection_launches": 2 * layers,
        "attention_launches": layers,
        "expert_launches": layers,
        "layers": layers,
        "collectives": layers * gathered,
        "collectives_by_extra_rank": layers * gathered * max(0, plan.world - 2),
        "passes": 1,
    }


def _one_shot_bytes(config: ModelConfig, work: Workload, plan: Plan) -> float:
    """Bytes that a rank receives when it reads the partial rows of all others, after attention and after the experts,
    and gathers the rows of the other DP groups before the experts."""
    own = -(-work.sequences // plan.dp) * work.new_tokens
    everyone = work.sequences * work.new_tokens
    rows = own * (plan.tp - 1) + own * (plan.world - 1) + (everyone - own)
    return config.num_layers * rows * config.hidden_size * BF16_BYTES
