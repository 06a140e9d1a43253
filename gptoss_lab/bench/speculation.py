"""What drafts are worth on this machine: acceptance, speed-up, and the speed-up that acceptance and step times predict.

Two things are measured.

`run`: one checkpoint with a draft model, a noisy copy of itself or prediction heads. Plain and drafting decoders take
turns on the same prompts; the clock runs from the moment every sequence has its first token to the last token of all.
Beside the ratio stand three step times measured apart (a step, a proposal, a check of k + 1 tokens) and what they and
the counted acceptance predict. In fp32 greedy tokens must be equal, or the run ends with an error; in bf16 a check has
other shapes than a step and rounds differently, so there the share of equal tokens is in the row.

`steps`: the same three times for models of real shapes with random weights, long contexts and batches, whose drafts
would never stand. From them follows the speed-up for any acceptance (`cost.speculation.speedup`).

    gptoss-lab bench speculation --noise 0.01 --draft-tokens 4
    gptoss-lab bench speculation --shapes gpt-oss-120b --draft-shapes gpt-oss-20b --experts mxfp4
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench.fast_model import Row, Subject, give_back, loaded, random_ids, synchronise
from gptoss_lab.bench.speculation_drafts import Drafts, Pair, load_pair
from gptoss_lab.bench.timing import clocks
from gptoss_lab.cost import decode_bound, verify_bound
from gptoss_lab.cost.speculation import StepSeconds, speedup, tokens_per_round
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.cached import CachedDecoder
from gptoss_lab.harmony import Message, render, system, user
from gptoss_lab.model.fast import FastTransformer, FastWeights, make_pool
from gptoss_lab.results import make_row, write_rows

SUITE = "speculation"


@dataclass(frozen=True)
class Case:
    """draft_tokens: proposals of a round. batch: prompts at once. new_tokens: of each answer. temperature: 0 is
    greedy."""

    draft_tokens: int
    batch: int = 1
    new_tokens: int = 64
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """For example "4 proposals, batch 1, greedy"."""
        how = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"{self.draft_tokens} proposals, batch {self.batch}, {how}"


CASES = tuple(Case(k, batch) for batch in (1, 8) for k in (1, 2, 4))


def run(
    path: Path, drafts: Drafts, out: Path | None = None, cases: Sequence[Case] = CASES, *,
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, forward: str = "plain",
    experts: str = "fp8", repetitions: int = 3,
) -> list[Row]:
    """Measure the cases on a checkpoint; print a line for each and write its row at once.

    forward, experts: see `load_pair`. repetitions: turns of each decoder. ValueError, RuntimeError (tokens differ).
    """
    pair = load_pair(path, drafts, torch.device(device), dtype, forward=forward, experts=experts,
                     batch=max(c.batch for c in cases), draft_tokens=max(c.draft_tokens for c in cases))
    about = {"model": pair.model.config.name, "ep": 1, "dp": 1, "tp": 1, "weights": path.name, "draft": drafts.name,
             "dtype": str(dtype).removeprefix("torch.")}
    backend = f"{forward} forward" + (f", {experts} experts" if forward == "fast" else "")
    rows = []
    for case in cases:
        rows.append(measure(pair, case, backend, about, repetitions))
        print(line(rows[-1]), flush=True)
        if out is not None:
            write_rows(out, rows[-1:])
    return rows


def measure(pair: Pair, case: Case, backend: str, about: dict[str, Any], repetitions: int) -> Row:
    """The row of one case."""
    prompts = questions(case.batch)
    sampling = [SamplingParams(temperature=case.temperature, seed=n, max_new_tokens=case.new_tokens, stop_ids=())
                for n in range(case.batch)]
    plain, drafting = pair.plain(), pair.drafting(case.draft_tokens)
    timed(pair.model, drafting, prompts, sampling)                       # warm; its counts are dropped
    drafting.acceptance = counts = type(drafting.acceptance)()
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    for _ in range(repetitions):
        rate, expected = timed(pair.model, plain, prompts, sampling)
        rates["plain"].append(rate)
        rate, found = timed(pair.model, drafting, prompts, sampling)
        rates["drafting"].append(rate)
    same = _same(expected, found)
    if same < 1 and case.temperature == 0 and pair.model.dtype == torch.float32:
        raise RuntimeError(f"{case.name}: {same:.1%} of the greedy tokens are those without drafts; all must be")
    steps, middle = step_seconds(pair, case, prompts), sorted(rates["plain"])[repetitions // 2]
    gain = sorted(rates["drafting"])[repetitions // 2] / middle
    return make_row(
        SUITE, f"decode with drafts, {case.name}", backend, "tokens_per_second", rates["drafting"], "tokens/s",
        peer=("plain decoder", middle), clocks=clocks(), batch=case.batch, tokens=max(map(len, prompts)),
        new_tokens=case.new_tokens, draft_tokens=case.draft_tokens, temperature=case.temperature, rounds=counts.rounds,
        proposed=counts.proposed, tested=counts.tested, stood=counts.stood, acceptance=counts.acceptance,
        tokens_per_round=counts.tokens_per_round, same_tokens=same,
        predicted_tokens_per_round=tokens_per_round(counts.acceptance, case.draft_tokens),
        step_ms=1e3 * steps.target, proposal_ms=1e3 * steps.draft, check_ms=1e3 * steps.verify, speedup=gain,
        predicted_speedup=speedup(counts.acceptance, case.draft_tokens, steps), **about)


def questions(count: int) -> list[list[int]]:
    """Prompts of about equal length: sums, in Harmony."""
    def one(n: int) -> list[Message]:
        return [system(), user(f"What is {37 + 5 * n} + {48 + 3 * n}?")]

    return [render(one(n)) for n in range(count)]


def timed(
    model: Any, decoder: CachedDecoder, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> tuple[float, list[list[int]]]:
    """(tokens per second once every sequence has its first token, tokens of each)."""
    found: list[list[int]] = [[] for _ in prompts]
    began, before = 0.0, 0
    for event in Engine(model, decoder).generate(prompts, sampling):
        found[event.sequence].append(event.token)
        if not began and all(found):
            synchronise(model.device)
            began, before = time.perf_counter(), sum(map(len, found))
    synchronise(model.device)
    spent = time.perf_counter() - began
    return (sum(map(len, found)) - before) / spent, found


def step_seconds(pair: Pair, case: Case, prompts: Sequence[Sequence[int]], readings: int = 5) -> StepSeconds:
    """Median seconds of a step, a proposal and a check, behind the prompts, for the whole batch."""
    propose = pair.proposing(case.batch)
    return StepSeconds(
        target=_pass_seconds(pair.model, prompts, 1, readings),
        draft=_pass_seconds(pair.draft, prompts, 1, readings) if propose is None
        else _median([_clocked(pair.model.device, torch.inference_mode()(propose)) for _ in range(readings + 1)][1:]),
        verify=_pass_seconds(pair.model, prompts, case.draft_tokens + 1, readings))


@torch.inference_mode()
def _pass_seconds(model: Any, prompts: Sequence[Sequence[int]], each: int, readings: int) -> float:
    """Seconds of a pass over `each` tokens of every sequence, with logits for all, taken back after each reading."""
    caches = [model.new_cache(len(prompt) + each, each) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    model(ids, [len(prompt) for prompt in prompts], caches, logits="none")
    new = torch.tensor([prompt[n] for prompt in prompts for n in range(each)], device=model.device)
    spent = []
    for _ in range(readings + 1):
        spent.append(_clocked(model.device, lambda: model(new, [each] * len(prompts), caches, logits="all").argmax(-1)))
        for cache, prompt in zip(caches, prompts, strict=True):
            cache.truncate(len(prompt))
    for cache in caches:
        if hasattr(cache, "release"):
            cache.release()
    return _median(spent[1:])


# -- step times of real shapes -----------------------------------------------------------------------------------------
def steps(
    target: Subject, draft: Subject, out: Path | None = None, batches: Sequence[int] = (1, 8, 32),
    lengths: Sequence[int] = (1, 2, 4), tokens: int = 8192, readings: int = 16,
) -> list[Row]:
    """Rows "a step", "a check of n" and "a proposal" for random weights; one model in memory at a time."""
    rows: list[Row] = []
    for subject, what, each in ((target, "a step", 1), *((target, f"a check of {k + 1}", k + 1) for k in lengths),
                                (draft, "a proposal", 1)):
        if not rows or rows[-1]["conditions"]["model"] != subject.config.name:
            weights = None
            give_back(subject.device)
            weights = loaded(subject)[0]
        for batch in batches:
            rows.append(step_row(subject, weights, what, batch, each, tokens, readings))
            print(line(rows[-1]), flush=True)
            if out is not None:
                write_rows(out, rows[-1:])
    return rows


def step_row(
    subject: Subject, weights: FastWeights, what: str, batch: int, each: int, tokens: int, readings: int
) -> Row:
    """ms of a pass over `each` new tokens of `batch` sequences that lie at `tokens`, in a captured step."""
    limit = (decode_bound(subject.config, tokens, batch, subject.precision) if each == 1 else
             verify_bound(subject.config, tokens, each - 1, batch, subject.precision))
    about = subject.conditions | {"batch": batch, "tokens": tokens, "new_tokens": each, "kv_filled": "random"}
    try:
        spent = _captured_seconds(weights, batch, each, tokens, readings)
    except torch.cuda.OutOfMemoryError as error:
        return make_row(SUITE, what, subject.backend, "ms_per_step", [], "ms", bound=1e3 * limit.seconds,
                        failed=f"does not fit: {str(error).splitlines()[0]}", **about)
    return make_row(SUITE, what, subject.backend, "ms_per_step", [1e3 * s for s in spent], "ms",
                    bound=1e3 * limit.seconds, clocks=clocks(), **about)


@torch.inference_mode()
def _captured_seconds(weights: FastWeights, batch: int, each: int, tokens: int, readings: int) -> list[float]:
    room = tokens + 2 * each + 8
    pool = make_pool(weights, tokens=batch * room, sequences=batch, draft=each)
    model = FastTransformer(weights, pool, sizes=(batch * each,), max_kv_len=room)
    for pages in (*pool.keys, *pool.values):
        pages.normal_()
    caches = [model.new_cache() for _ in range(batch)]
    for cache in caches:
        cache.reserve(tokens - 1 + each)
        cache.commit(tokens - 1)
    ids = random_ids(weights.config, (readings + 1) * batch * each, weights.device).view(readings + 1, -1)
    spent = []
    for row in ids:
        spent.append(_clocked(model.device, lambda row=row: model(row, [each] * batch, caches, logits="all")))
        for cache in caches:
            cache.truncate(tokens - 1)
    return spent[1:]


def line(row: Row) -> str:
    """A row for people."""
    of = row["conditions"]
    if row["value"] is None:
        return f"{of['model']:14} {row['case']:44} {of['failed'][:80]}"
    if row["metric"] == "ms_per_step":
        return (f"{of['model']:14} {row['case']:16} batch {of['batch']:<4} {row['value']:9.3f} ms, bound "
                f"{row['bound']:.3f}, {row['bound'] / row['value']:.1%} of it")
    return (f"{of['model']:14} {row['case']:44} {of['acceptance']:6.1%} stood, {of['tokens_per_round']:.2f} tokens a "
            f"round; speed-up {of['speedup']:.2f}, predicted {of['predicted_speedup']:.2f}")


def _same(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Share of equal tokens, place by place."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _clocked(device: torch.device, work: Callable[[], object]) -> float:
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
