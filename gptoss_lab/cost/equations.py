"""Result rows as lines of the fit: whole passes of an engine, and kernels that were timed alone.

A whole pass (suites prefill and decode) has every column; it is what the model must predict, so its lines have weight
1. A kernel (suites attention, moe, comm, and projections in profile) has only its own columns; timed alone, at rested
clocks, it is faster than inside a pass, so its lines have weight 0.1: they decide what the passes leave open, such as
which part of a layer's time is attention, and do not overrule them.

Rows are taken as the benchmarks write them (`results`). No line: a row without a value, one that was not measured on a
GPU, another model, the plain forward, a split sequence, and a kernel without its sinks, bias or norm. Of rows with the
same identity the last one counts.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.cost.columns import columns, expert_launches
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.exchanges import own_sum_bytes, whole_sum_bytes
from gptoss_lab.cost.experts import expected_distinct_experts
from gptoss_lab.cost.fit import Equation
from gptoss_lab.cost.hardware import H200
from gptoss_lab.cost.holdout import held_out
from gptoss_lab.cost.parts import expert_bytes
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import BF16_BYTES, Precision
from gptoss_lab.cost.workload import decode, prefill

Row = Mapping[str, Any]
ENGINE = "fast"
"""The engine's rows have backends that begin so: "fast, fp8 experts, fp8 projections"."""
RELEASED_MODELS = ("gpt-oss-20b", "gpt-oss-120b")
KERNEL_WEIGHT = 0.1
_METRIC = {"prefill": ("seconds", 1.0), "decode": ("ms_per_step", 1e-3)}
_DECODE_TOKENS = 128        # up to so many tokens the benchmarks of single kernels time a decode step
_FORMS = {"dense": "bf16", "bfloat16": "bf16"}


def plan_of(conditions: Row) -> Plan:
    """The plan of a row; what is not said is 1."""
    return Plan(*(conditions.get(key, 1) for key in ("ep", "dp", "tp")))


def precision_of(conditions: Row) -> Precision:
    """The formats of a row, from its conditions experts (default fp8), projections and kv (bf16)."""
    experts, dense, kv = (conditions.get(key, default) for key, default in
                          (("experts", "fp8"), ("projections", "bf16"), ("kv", "bf16")))
    return Precision(_FORMS.get(experts, experts), _FORMS.get(dense, dense), _FORMS.get(kv, kv), mxfp4_unit="fp8")


def engine_rows(rows: Iterable[Row], phase: str, engine: str = ENGINE) -> list[Row]:
    """The rows of whole passes of an engine, the last of each identity.

    phase: 'prefill' or 'decode'. engine: what the row's backend begins with. CostError if there is no such phase.
    """
    if phase not in _METRIC:
        raise CostError(f"phase is {phase!r}; one of {', '.join(_METRIC)} is expected")
    own = [row for row in rows if row["suite"] == phase and row["metric"] == _METRIC[phase][0]
           and row["value"] is not None and row["gpu"] is not None and row["backend"].split(",")[0] == engine
           and {"model", "batch", "tokens"} <= set(row["conditions"])
           and row["conditions"]["model"] in RELEASED_MODELS
           and not row["conditions"].get("sequence_split")]
    return list({_identity(row): row for row in own}.values())


def pass_seconds(row: Row) -> float:
    """Seconds of a row of `engine_rows`."""
    return row["value"] * _METRIC[row["suite"]][1]


def pass_equation(row: Row) -> Equation:
    """A row of suite prefill or decode as a line. CostError for a plan or length the model does not have.

    Where the row says how many experts a layer really used, that replaces the expectation.
    """
    of = row["conditions"]
    config, plan, phase, precision = _config(of), plan_of(of), row["suite"], precision_of(of)
    work = (prefill if phase == "prefill" else decode)(of["tokens"], of["batch"])
    amounts = columns(config, work, precision, plan)
    if "experts_hit" in of:
        expected = expected_distinct_experts(config, work.sequences * work.new_tokens)
        amounts[f"expert_weights_{precision.experts}"] *= of["experts_hit"] / expected
    return Equation(
        f"{config.name} {plan}, {precision.experts} experts, {of['tokens']} tokens, batch {of['batch']}",
        pass_seconds(row), amounts, held_out=held_out(of["tokens"], of["batch"], plan.world),
    )


def kernel_equations(rows: Iterable[Row], phase: str, weight: float = KERNEL_WEIGHT) -> list[Equation]:
    """Lines of the kernels' rows that belong to a phase: of each case and weight format the fastest backend."""
    best: dict[tuple[Any, ...], tuple[Row, dict[str, float]]] = {}
    for row in rows:
        amounts = _kernel_amounts(row, phase)
        if amounts is None:
            continue
        where = (str(row["conditions"].get(key)) for key in ("model", "tp", "tokens", "batch"))
        key = (row["suite"], row["case"], tuple(amounts), *where)
        if key not in best or row["value"] < best[key][0]["value"]:
            best[key] = (row, amounts)
    return [
        Equation(f"{row['suite']} {row['case']}, {row['backend']}", row["value"] * 1e-6, amounts, weight,
                 held_out(row["conditions"].get("tokens"), row["conditions"].get("batch"), _gpus(row)))
        for row, amounts in best.values()
    ]


def _gpus(row: Row) -> int:
    """For the hold-out. A collective on its own exists on several GPUs alone, so those of two are seen; what is kept
    back is every pass that has collectives in it."""
    return 1 if row["suite"] == "comm" else plan_of(row["conditions"]).world


def ceiling_equations(rows: Iterable[Row], phase: str) -> list[Equation]:
    """What a plain copy and large products reach (suite profile), as lines: how far a kernel nobody timed may get."""
    reached = {
        "device copy": ("activations", *(("projections_bf16", "projections_fp8") if phase == "decode" else ())),
        "bf16 product": ("projections_bf16",) if phase == "prefill" else (),
        "fp8 product, rowwise scales": ("projections_fp8",) if phase == "prefill" else (),
    }
    return [
        Equation(row["case"], row["bound"] / row["value"], {name: 1.0})
        for row in rows if row["suite"] == "profile" and row["value"] and row["bound"]
        for name in reached.get(row["case"].removeprefix("ceiling: "), ())
    ]


def _kernel_amounts(row: Row, phase: str) -> dict[str, float] | None:
    """The columns of a kernel's row in `phase`; None if it is not one of them."""
    whole = row["suite"] == "comm" or not any(word in row["backend"] for word in ("without", "alone"))
    if row["metric"] != "microseconds" or row["value"] is None or row["gpu"] is None or not whole:
        return None
    kinds = {"attention": _attention_amounts, "moe": _moe_amounts, "comm": _comm_amounts, "profile": _product_amounts}
    return kinds[row["suite"]](row, phase) if row["suite"] in kinds else None


def _attention_amounts(row: Row, phase: str) -> dict[str, float] | None:
    if not row["bound"] or not row["case"].split("/")[0].endswith(phase):
        return None
    kind = "attention_full" if row["conditions"].get("window") is None else "attention_window"
    return {kind: row["bound"] * 1e-6, "attention_launches": 1.0}


def _moe_amounts(row: Row, phase: str) -> dict[str, float] | None:
    """A whole MoE layer with even routing."""
    of = row["conditions"]
    if not row["case"].startswith("layer/") or of.get("skew") or "model" not in of or _phase(row) != phase:
        return None
    config, form = preset(of["model"]), "mxfp4" if "mxfp4" in row["backend"] else "fp8"
    hit = of.get("experts_hit", expected_distinct_experts(config, of["tokens"]))
    flop = 6.0 * of["tokens"] * config.experts_per_token * config.hidden_size * config.intermediate_size
    return {f"experts_{form}": flop / H200.fp8_flop_per_second,
            f"expert_weights_{form}": hit * sum(expert_bytes(config, form)) / H200.memory_bytes_per_second,
            "expert_launches": expert_launches(of["tokens"], form)}


def _comm_amounts(row: Row, phase: str) -> dict[str, float] | None:
    """A sum at the end of half a layer, of whole rows or of own ones, or a library's exchange; both phases use them.

    No gather was timed: a library's all-reduce alone, a reduce-scatter and an all-gather in one call, stands for both.
    Its bytes are those of the two together, its latency, a copy of the rows included, that of one call.
    """
    of, ranks, form = row["conditions"], plan_of(row["conditions"]).world, row["backend"]
    if not row["case"].startswith("all-reduce") or ranks == 1 or "apart" in form:
        return None
    whole, one_shot = whole_sum_bytes(of["hidden"], ranks, of["tokens"]), (ranks - 1) * of["tokens"] * of["hidden"]
    waits = {"collectives_by_extra_rank": float(max(0, ranks - 2))}
    if "alone" in form:
        return {"link_gathers": whole / H200.link_bytes_per_second, "gathers": 1.0, **waits}
    if "own rows" in form:
        own = own_sum_bytes(of["hidden"], ranks, of["tokens"])
        return {"link": own / H200.link_bytes_per_second, "collectives": 1.0, **waits}
    return {"link": whole / H200.link_bytes_per_second,
            "link_one_shot": one_shot * BF16_BYTES / H200.link_bytes_per_second, "collectives": 1.0, **waits}


def _product_amounts(row: Row, phase: str) -> dict[str, float] | None:
    """A projection of one layer."""
    if " projection/" not in row["case"] or not row["bound"] or _phase(row) != phase:
        return None
    form = "fp8" if "e4m3" in row["backend"] else "bf16"
    return {f"projections_{form}": row["bound"] * 1e-6, "projection_launches": 1.0}


def _phase(row: Row) -> str:
    return "decode" if row["conditions"]["tokens"] <= _DECODE_TOKENS else "prefill"


def _config(conditions: Row) -> ModelConfig:
    config = preset(conditions["model"])
    layers = conditions.get("layers", config.num_layers)
    return config if layers == config.num_layers else config.with_layers(layers)


def _identity(row: Row) -> tuple[Any, ...]:
    of = row["conditions"]
    return (row["suite"], plan_of(of), precision_of(of), of["model"], of.get("layers"), of["tokens"], of["batch"])
