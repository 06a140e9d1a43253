"""What drafts gain on this machine: the measured speed-up beside what acceptance and step times predict.

The clocks are those of `gptoss-lab bench speculation`: plain and drafting decoders take turns on the same prompts, and
time runs from the first token of every sequence to the last of all; a step, a proposal and a check are timed apart.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gptoss_lab.bench.speculation import Case, step_seconds
from gptoss_lab.bench.speculation import timed as clocked
from gptoss_lab.bench.speculation_drafts import Pair
from gptoss_lab.cost.speculation import StepSeconds, speedup
from gptoss_lab.engine import SamplingParams
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.viz.table import Table, table


@dataclass(frozen=True)
class Gain:
    """One run. steps: seconds of a step, a proposal, a check. counts: what stood in it. measured: the speed-up, the
    median of the turns."""

    draft_tokens: int
    steps: StepSeconds
    counts: Acceptance
    measured: float

    @property
    def predicted(self) -> float:
        """The speed-up that the counted acceptance and the step times give."""
        return speedup(self.counts.acceptance, self.draft_tokens, self.steps)


def timed(pair: Pair, prompts: Sequence[Sequence[int]], draft_tokens: int, new_tokens: int, turns: int = 3) -> Gain:
    """Greedy decoding of the prompts in one batch, with and without drafts.

    prompts: longer than `draft_tokens`. turns: of each decoder. RuntimeError if the drafts change a token in fp32.
    """
    sampling = [SamplingParams(temperature=0, max_new_tokens=new_tokens)] * len(prompts)
    ratios, counts = [], Acceptance()
    for _ in range(turns):
        rate, expected = clocked(pair.model, pair.plain(), prompts, sampling)
        drafting = pair.drafting(draft_tokens)
        faster, found = clocked(pair.model, drafting, prompts, sampling)
        if found != expected and pair.model.dtype.itemsize >= 4:
            raise RuntimeError("the greedy tokens with drafts are not those without")
        ratios.append(faster / rate)
        counts = drafting.acceptance                    # the same in every turn
    steps = step_seconds(pair, Case(draft_tokens, len(prompts), new_tokens), prompts)
    return Gain(draft_tokens, steps, counts, sorted(ratios)[turns // 2])


def gains_table(gains: Mapping[str, Gain]) -> Table:
    """Who drafts, for what -> its run, marked live."""
    rows = [
        [name, g.draft_tokens, f"{g.counts.acceptance:.2f}", f"{g.counts.tokens_per_round:.2f}",
         *(f"{1e3 * s:.1f}" for s in (g.steps.target, g.steps.draft, g.steps.verify)), f"{g.predicted:.2f}",
         f"{g.measured:.2f}", "live"]
        for name, g in gains.items()
    ]
    return table(rows, ["who drafts", "k", "stood, of tested", "tokens a round", "step, ms", "proposal, ms",
                        "check, ms", "speed-up predicted", "measured", "origin"])
