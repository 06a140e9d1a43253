"""What the ranks of this engine say to each other in a pass, which `columns` turns into seconds: bytes and counts.

`parts` counts the least that a TP-only scheme in bf16 must move, for bounds. The engine has three kinds of exchange
(gptoss_lab/model/fast/ranks.py), and each is its own kernel with its own speed:

    sum of whole rows    over the tp ranks: residual and all parts in one kernel, bf16, after attention and experts
    sum of own rows      the same for a long prompt: a rank sums its rows alone and hands out their norm in e4m3
    gather and back      over the dp groups: a library's all-gather of bf16 rows before the experts, and its
                         reduce-scatter behind them, followed by an addition

Every rank has the whole embedding, so looking it up moves nothing. `rows` are always those of the fullest data-parallel
group: a library's exchange of uneven rows travels padded to the longest.

What is lost: the few numbers that a step's groups exchange beside rows (how many rows each has), and the logits.
"""
from __future__ import annotations

from dataclasses import replace

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.plan import Plan
from gptoss_lab.cost.precision import BF16_BYTES, FP8_BLOCK, Precision
from gptoss_lab.cost.workload import Workload

OWN_ROWS = 1024
"""A prompt's step of at least so many rows takes own ones: LEAST_ROWS of gptoss_lab/model/fast/own_rows.py."""
_CHOICE_BYTES = 8       # of one expert of one token, handed out: an int32 id and an fp32 weight


def keeps_own_rows(plan: Plan, precision: Precision, rows: int) -> bool:
    """Whether each rank keeps rows of its own in such a step: the engine's condition (`obstacle` and `takes` in
    gptoss_lab/model/fast/own_rows.py), the buffers of the sums being as long as the prompt."""
    return plan.dp == 1 and plan.tp > 1 and precision.experts == precision.dense == "fp8" and rows >= OWN_ROWS


def whole_sum_bytes(hidden: int, ranks: int, rows: int) -> float:
    """Received in one sum of whole rows: 2 (p - 1) / p of [rows, H] in bf16."""
    return 2 * (ranks - 1) / ranks * rows * hidden * BF16_BYTES


def own_sum_bytes(hidden: int, ranks: int, rows: int, handed_out: bool = True) -> float:
    """Received in one sum of own rows: those of every other part in bf16, and where they are handed out the others'
    rows in e4m3 with a scale for each 128 values (kernels/gptoss_kernels/comm/own_rows.py). Between two ranks three
    quarters of `whole_sum_bytes`."""
    codes = (hidden + 4 * -(-hidden // FP8_BLOCK)) if handed_out else 0
    return (ranks - 1) / ranks * rows * (hidden * BF16_BYTES + codes)


def sum_bytes(config: ModelConfig, plan: Plan, rows: int, own: bool) -> float:
    """Received over TP ranks in a pass: two sums a layer; of own rows the last is not handed out, and in every layer
    their experts are."""
    layers, hidden = config.num_layers, config.hidden_size
    if not own:
        return 2 * layers * whole_sum_bytes(hidden, plan.tp, rows)
    choice = (plan.tp - 1) / plan.tp * rows * config.experts_per_token * _CHOICE_BYTES
    return ((2 * layers - 1) * own_sum_bytes(hidden, plan.tp, rows) + own_sum_bytes(hidden, plan.tp, rows, False)
            + layers * choice)


def one_shot_bytes(config: ModelConfig, plan: Plan, rows: int) -> float:
    """Received in a pass where a rank reads the whole parts of all others, after attention and after the experts."""
    return 2 * config.num_layers * (plan.tp - 1) * rows * config.hidden_size * BF16_BYTES


def gather_bytes(config: ModelConfig, plan: Plan, rows: int) -> float:
    """Received in a pass for the rows of the other groups before the experts, and for their parts of the own rows
    behind them: (dp - 1) [rows, H] in bf16 each (`_gathered_experts` in gptoss_lab/model/fast/ranks.py)."""
    return 2 * config.num_layers * (plan.dp - 1) * rows * config.hidden_size * BF16_BYTES


def sum_count(config: ModelConfig, plan: Plan, own: bool) -> int:
    """Meetings of the tp ranks in a pass: two sums a layer; of own rows a third, which hands out the experts."""
    return config.num_layers * (3 if own else 2) if plan.tp > 1 else 0


def gather_count(config: ModelConfig, plan: Plan) -> int:
    """The library's exchanges of a pass: two a layer where there are several groups."""
    return 2 * config.num_layers if plan.dp > 1 else 0


def normed_rows(config: ModelConfig, plan: Plan, rows: int, everyone: int, own: bool) -> float:
    """Token rows that a rank norms in a pass, layers added up: before attention and the head those of its group,
    before the experts those of everyone; of own rows its share alone."""
    share = plan.tp if own else 1
    return ((config.num_layers + 1) * rows + config.num_layers * everyone) / share


def stepped(work: Workload, plan: Plan) -> Workload:
    """The work as the engine does it: a captured step has as many rows in every group as in the fullest, and the spare
    ones reach experts, since other groups do not know them (ranks.py). A prompt's rows travel as they are."""
    if work.sampled_tokens < work.new_tokens:
        return work
    return replace(work, sequences=plan.dp * -(-work.sequences // plan.dp))
