"""Every plan and batch at once: speed per user against dollars, the Pareto front, and which plan wins where.

A decode chart has one curve per plan over the batch. Going along it users get slower and tokens cheaper, because the
weights of a step are shared by more of them. A point is on the front if no other is at least as fast and as cheap.
"Which plan is best" has no answer without a speed: `winners` asks for the cheapest point that is fast enough, goal by
goal, and `wins` counts.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.bounds import decode_bound, prefill_bound
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.memory import MemoryFit, memory_fit
from gptoss_lab.cost.performance import PerformanceModel
from gptoss_lab.cost.plan import Plan, all_plans
from gptoss_lab.cost.precision import FP8_EXPERTS, Precision
from gptoss_lab.cost.price import USD_PER_GPU_HOUR, OperatingPoint, decode_point, prefill_point

WAYS = (1, 2, 4, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
EP_PLANS = tuple(Plan(n, 1, n) for n in WAYS)           # the four curves of the published charts
NODE_PLANS = tuple(plan for world in WAYS for plan in all_plans(world))
GOALS = (25, 50, 75, 100, 150, 200, 250, 300, 400, 500)
"""Tokens per second per user that `winners` asks for."""
Seconds = Callable[[Plan, int], float]


@dataclass(frozen=True)
class Candidate:
    """A plan at a batch: its operating point and whether it fits into memory."""

    plan: Plan
    batch: int
    tokens: int
    point: OperatingPoint
    memory: MemoryFit

    @property
    def speed(self) -> float:
        """Tokens per second that one user sees."""
        return self.point.tokens_per_second_per_user

    @property
    def usd(self) -> float:
        """Dollars per million tokens."""
        return self.point.usd_per_million_tokens


def step_seconds(
    model: PerformanceModel | None, config: ModelConfig, phase: str, tokens: int, precision: Precision
) -> Seconds:
    """seconds(plan, batch) of a pass by a calibration, or at the bound, parts one after the other, for None."""
    if model is not None:
        passes = model.of(phase)
        return lambda plan, batch: passes.seconds(config, tokens, batch, plan, precision)
    limit = decode_bound if phase == "decode" else prefill_bound
    return lambda plan, batch: limit(config, tokens, batch, precision, plan).sequential_seconds


def sweep(
    model: PerformanceModel | None, config: ModelConfig, phase: str, tokens: int, plans: Iterable[Plan] = EP_PLANS,
    batches: Iterable[int] = BATCHES, usd_per_gpu_hour: float = USD_PER_GPU_HOUR, utilisation: float = 1.0,
    precision: Precision = FP8_EXPERTS,
) -> list[Candidate]:
    """One candidate per plan and batch, in that order; what does not fit into memory is in it and says so.

    model: a calibration, None for the bound. phase: 'prefill' or 'decode'. tokens: prompt or context of each sequence.
    """
    batches, of = tuple(batches), step_seconds(model, config, phase, tokens, precision)
    found = []
    for plan in plans:
        for batch in batches:
            price = (usd_per_gpu_hour, utilisation)
            point = (decode_point(of(plan, batch), batch, plan.world, *price) if phase == "decode" else
                     prefill_point(of(plan, batch), tokens, batch, plan.world, *price))
            found.append(Candidate(plan, batch, tokens, point, memory_fit(config, tokens, batch, precision, plan)))
    return found


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that fit and that no other one beats in speed without costing more, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted((c for c in candidates if c.memory.fits), key=lambda c: (-c.speed, c.usd)):
        if not front or candidate.usd < front[-1].usd:
            front.append(candidate)
    return front


def cheapest_at(candidates: Iterable[Candidate], goal: float) -> Candidate | None:
    """The cheapest candidate that fits and gives each user `goal` tokens per second; None if none does."""
    enough = [c for c in candidates if c.memory.fits and c.speed >= goal]
    return min(enough, key=lambda c: (c.usd, c.plan.world, -c.speed), default=None)


def winners(candidates: Iterable[Candidate], goals: Sequence[float] = GOALS) -> dict[float, Candidate]:
    """The cheapest candidate by goal, of the goals that any candidate reaches."""
    candidates = list(candidates)
    found = {goal: cheapest_at(candidates, goal) for goal in goals}
    return {goal: best for goal, best in found.items() if best is not None}


def wins(candidates: Iterable[Candidate], goals: Sequence[float] = GOALS) -> Counter[Plan]:
    """For how many goals each plan is the cheapest. CostError if no goal can be reached."""
    best = winners(candidates, goals)
    if not best:
        raise CostError(f"no plan reaches any of the goals {', '.join(f'{g:g}' for g in goals)} tokens/s per user")
    return Counter(candidate.plan for candidate in best.values())
