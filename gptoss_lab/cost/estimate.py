"""One question, every kind of answer: the bound, what was measured, what was published, what the models say.

Each answer keeps its mark and stays in its own place; nothing is filled in from another. Where an answer is missing the
reason takes its place.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.bounds import Bound, decode_bound, prefill_bound
from gptoss_lab.cost.equations import engine_rows, pass_seconds, plan_of, precision_of
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.memory import MemoryFit, memory_fit
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import SINGLE, Plan
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR, OperatingPoint, decode_point, prefill_point
from gptoss_lab.cost.published import read_published


@dataclass(frozen=True)
class Answer:
    """seconds of the pass, with its mark ('measured', 'published', 'modelled') and source; or None, and why."""

    name: str
    mark: str
    seconds: float | None
    source: str

    def point(self, question: Question) -> OperatingPoint | None:
        """Speed and price at these seconds; None without them."""
        if self.seconds is None:
            return None
        price = (question.plan.world, question.usd_per_gpu_hour, question.utilisation)
        if question.phase == "decode":
            return decode_point(self.seconds, question.batch, *price)
        return prefill_point(self.seconds, question.tokens, question.batch, *price)


@dataclass(frozen=True)
class Question:
    """A pass: model, phase ('prefill' or 'decode'), plan, batch, tokens (prompt or context), formats, and the price."""

    config: ModelConfig
    phase: str
    tokens: int
    batch: int = 1
    plan: Plan = SINGLE
    precision: Precision = FP8_EXPERTS
    usd_per_gpu_hour: float = USD_PER_GPU_HOUR
    utilisation: float = 1.0

    def __post_init__(self) -> None:
        if self.phase not in ("prefill", "decode"):
            raise CostError(f"phase is {self.phase!r}; one of prefill, decode is expected")

    @property
    def bound(self) -> Bound:
        """The bound of the pass."""
        limit = prefill_bound if self.phase == "prefill" else decode_bound
        return limit(self.config, self.tokens, self.batch, self.precision, self.plan)

    @property
    def memory(self) -> MemoryFit:
        """Whether weights and KV fit, with the numbers."""
        return memory_fit(self.config, self.tokens, self.batch, self.precision, self.plan)


def answers(
    question: Question, rows: Iterable[Mapping[str, Any]], models: Sequence[PerformanceModel]
) -> list[Answer]:
    """The bound, the measured row, the published row and one answer per model, in this order."""
    return [
        Answer("bound", "modelled", question.bound.seconds, "datasheet rates"),
        measured(question, rows), _published(question), *(_modelled(question, model) for model in models),
    ]


def measured(question: Question, rows: Iterable[Mapping[str, Any]]) -> Answer:
    """The recorded pass that the question asks for; without seconds where there is none."""
    for row in engine_rows(rows, question.phase):
        of = row["conditions"]
        if ((of["model"], of["tokens"], of["batch"]) == (question.config.name, question.tokens, question.batch)
                and plan_of(of) == question.plan
                and precision_of(of) == replace(question.precision, mxfp4_unit="fp8")):
            source = f"{row['backend']}, {row['gpu']}, {row['date']}"
            return Answer("measured", "recorded", pass_seconds(row), source)
    return Answer("measured", "recorded", None, "not measured yet")


def _published(question: Question) -> Answer:
    if question.phase == "prefill" and question.batch == 1:
        for row in read_published():
            if (row.model, row.plan, row.input_tokens) == (question.config.name, question.plan, question.tokens):
                return Answer("published", "published", row.latency_s, "the post's prefill table, FP8")
    return Answer("published", "published", None, "the post prints no such number")


def _modelled(question: Question, model: PerformanceModel) -> Answer:
    try:
        passes = model.of(question.phase)
        seconds = passes.seconds(question.config, question.tokens, question.batch, question.plan, question.precision)
    except CostError as error:
        return Answer(model.name, "modelled", None, str(error).removeprefix(f"{model.name}: "))
    return Answer(model.name, "modelled", seconds, f"{model.basis}; {passes.error_sentence()}")
