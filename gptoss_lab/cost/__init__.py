"""What a pass costs at least, in bytes, FLOPs, seconds and dollars. Pure functions of a `ModelConfig`; no torch.

hardware, precision, plan, workload say what is asked. parameters, experts, parts count. bounds and memory turn counts
into seconds and into what fits. price turns seconds into dollars. published, speculation and formats are three
questions answered with them. Every name carries its unit.

On top of the bounds stands a model of real times, imported by module: columns (what a pass asks of each kernel) and
exchanges (what its ranks say to each other), equations and figures (measurements as lines), fit, holdout, performance
(the calibrations and their errors). estimate, comparison, sweep and pools ask it about one pass, the published rows,
every plan, and two pools; queueing, fleet and scale (which need simpy) about a whole fleet.
"""
from gptoss_lab.cost.bounds import Bound, PartBound, bound, decode_bound, prefill_bound, verify_bound
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.experts import expected_distinct_experts
from gptoss_lab.cost.hardware import H200, H200_MEASURED, Hardware
from gptoss_lab.cost.memory import (
    MemoryFit,
    kv_bytes,
    kv_bytes_per_gpu,
    max_sequences,
    memory_fit,
    weight_bytes_per_gpu,
)
from gptoss_lab.cost.parts import Part, forward_parts, total
from gptoss_lab.cost.plan import Plan, all_plans
from gptoss_lab.cost.precision import FP8_EXPERTS, RELEASED, SERVED, Precision
from gptoss_lab.cost.price import OperatingPoint, TokenPrice, decode_point, prefill_point, usd_per_million_tokens
from gptoss_lab.cost.workload import Workload, decode, prefill, verify

__all__ = [
    "FP8_EXPERTS", "H200", "H200_MEASURED", "RELEASED", "SERVED", "Bound", "CostError", "Hardware", "MemoryFit",
    "OperatingPoint", "Part", "PartBound", "Plan", "Precision", "TokenPrice", "Workload", "all_plans", "bound",
    "decode", "decode_bound", "decode_point", "expected_distinct_experts", "forward_parts", "kv_bytes",
    "kv_bytes_per_gpu",
    "max_sequences", "memory_fit", "prefill", "prefill_bound", "prefill_point", "total", "usd_per_million_tokens",
    "verify", "verify_bound", "weight_bytes_per_gpu",
]
