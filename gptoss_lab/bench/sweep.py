"""All plans of a node, in the order of their worth: prefill, decode, combine, hand-over; each row written as measured.

A machine with many GPUs is there for minutes. So the cells come sorted by what they are worth, each row is written at
once, cells that the file holds already are left out, and none is begun that would end after the time allowed: run it
again and it goes on. A plan is timed only after its logits of a small prompt agree with those of a single rank.

    gptoss-lab bench sweep --world 2 --seconds 540                       two GPUs, random weights of the real shapes
    gptoss-lab bench sweep --world 2 --model nano --small                CPU ranks, every line but the kernels
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench import comm, sweep_work
from gptoss_lab.bench.rank_model import RankSubject
from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import decode_bound, prefill_bound
from gptoss_lab.cost import plan as cost_plan
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.precision import Precision
from gptoss_lab.parallel import Plan, RankError, Ranks, valid_plans
from gptoss_lab.results import make_row, read_rows, write_rows

Row = dict[str, Any]
PROMPTS, CONTEXTS, BATCHES = (8192, 32768, 65536, 128000), (8192, 32768), (1, 8, 32, 128)
TOLERANCE = {"fast on a GPU": 0.03, "plain on a GPU": 0.02, "CPU": 1e-4}


@dataclass(frozen=True)
class Cell:
    """One number to measure. kind: "prefill" or "decode"."""

    kind: str
    subject: RankSubject
    tokens: int
    batch: int

    @property
    def name(self) -> str:
        """For example "prefill gpt-oss-120b EP2 DP1 TP2 8192 x 1"."""
        return f"{self.kind} {self.subject.config.name} {self.subject.plan} {self.tokens} x {self.batch}"


def cells(
    models: Sequence[ModelConfig], world: int, *, checkpoint: Path | None = None, small: bool = False
) -> list[Cell]:
    """Every cell of a world of `world` ranks in the order of worth. small: short prompts, for CPU ranks."""
    prompts, contexts = ((64, 200), (64,)) if small else (PROMPTS, CONTEXTS)
    batches = (1, 4) if small else BATCHES
    found: list[tuple[float, Cell]] = []
    for order, config in enumerate(models):
        for plan in (*valid_plans(config, world), *valid_plans(config, world, sequence_split=True)):
            experts = "dense" if small else "fp8"
            subject = RankSubject(config, plan, experts, checkpoint, "dense" if small else "fp8")
            worth = order + _worth(plan)
            found += [(worth + 0.1 * n, Cell("prefill", subject, tokens, plan.dp)) for n, tokens in enumerate(prompts)]
            found += [(worth + 0.5 + 0.1 * n + 0.02 * m, Cell("decode", subject, tokens, batch))
                      for n, tokens in enumerate(contexts) for m, batch in enumerate(batches)]
    return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


def _worth(plan: Plan) -> int:
    """0 first: the post's own plans EPn DP1 TPn, then the split sequence, then heads alone, then data parallel."""
    if plan.sequence_split:
        return 4 if plan.ep == plan.world and plan.dp == 1 else 12
    if plan.dp == 1:
        return 0 if plan.ep == plan.world else 6 if plan.ep == 1 else 10
    return 8 if plan.tp == 1 and plan.ep == plan.world else 14


def bound_seconds(cell: Cell, gpus: bool) -> float | None:
    """The datasheet's least time; None on CPUs and for plans that the bounds do not know (SP)."""
    plan, experts = cell.subject.plan, cell.subject.experts
    if not gpus or plan.sequence_split:
        return None
    dense = cell.subject.projections == "dense" or not cell.subject.fast
    precision = Precision("bf16" if experts == "dense" else experts, "bf16" if dense else "fp8", mxfp4_unit="fp8")
    bound = prefill_bound if cell.kind == "prefill" else decode_bound
    try:
        return bound(cell.subject.config, cell.tokens, cell.batch, precision,
                     cost_plan.Plan(plan.ep, plan.dp, plan.tp)).seconds
    except CostError:
        return None


def row_of(
    cell: Cell, readings: Sequence[Sequence[float]] | None, gpus: bool, failed: str | None = None
) -> Row:
    """The row of a cell: of each reading the slowest rank."""
    prefill, seconds = cell.kind == "prefill", bound_seconds(cell, gpus)
    raw = [max(each) for each in zip(*readings, strict=True)] if readings else []
    return make_row(
        cell.kind, f"{cell.kind} over ranks", cell.subject.backend, "seconds" if prefill else "ms_per_step", raw,
        "s" if prefill else "ms", bound=seconds if seconds is None or prefill else 1e3 * seconds, failed=failed,
        tokens=cell.tokens, batch=cell.batch, ranks="nccl" if gpus else "gloo", **cell.subject.conditions)


def run(
    out: Path, models: Sequence[ModelConfig], world: int, *, seconds: float | None = None, repetitions: int = 5,
    steps: int = 16, checkpoint: Path | None = None, small: bool = False, comms: bool = True,
    plans: Sequence[Plan] = (),
) -> list[Row]:
    """Measure what `out` does not hold yet; returns the new rows.

    out: a .jsonl file. seconds: begin nothing that is expected to end later. checkpoint: its weights (default: random
    ones made on the device). small: see `cells`. comms: first the combine and the hand-over (comm.py). plans: only
    these (default: all of the world).
    """
    sweep = _Sweep(out, world, repetitions, steps, seconds)
    done = {_key(row) for row in read_rows(out)} if out.exists() else set()
    if comms and not any(key[0] == "comm" for key in done):
        sweep.keep(comm.run(None, world, (1, 8) if small else comm.ROWS, repetitions, models[0].name,
                            64 if small else 8192), show=False)         # it prints its own
    todo = [cell for cell in cells(models, world, checkpoint=checkpoint, small=small)
            if _cell_key(cell) not in done and (not plans or cell.subject.plan in plans)]
    longest = 0.0
    try:
        for subject in dict.fromkeys(cell.subject for cell in todo):
            if sweep.left() <= 0 or sweep.left() < 2 * longest:
                print(f"{subject.plan} and what follows left out: {sweep.left():.0f} s are left", flush=True)
                break
            begin = time.monotonic()
            sweep.measure(subject, [cell for cell in todo if cell.subject == subject])
            longest = max(longest, time.monotonic() - begin)
    finally:
        sweep.close()
    print(f"{len(sweep.new)} rows in {sweep.spent():.0f} s; {len(todo)} cells were open", flush=True)
    return sweep.new


class _Sweep:
    """Ranks that stay from plan to plan, the logits of one rank to compare with, and the file that rows go to."""

    def __init__(self, out: Path, world: int, repetitions: int, steps: int, seconds: float | None) -> None:
        self.out, self.world, self.repetitions, self.steps, self.seconds = out, world, repetitions, steps, seconds
        self.gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world
        self.new: list[Row] = []
        self._start, self._held = time.monotonic(), ExitStack()
        self._ranks: Ranks | None = None
        self._alone: dict[RankSubject, torch.Tensor] = {}

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds that may still be used."""
        return float("inf") if self.seconds is None else self.seconds - self.spent()

    def keep(self, rows: Iterable[Row], show: bool = True) -> None:
        """Write rows at once."""
        made = list(rows)
        write_rows(self.out, made)
        self.new.extend(made)
        for row in made if show else ():
            print(text(row), flush=True)

    def close(self) -> None:
        """End the ranks."""
        self._held.close()
        self._ranks = None

    def measure(self, subject: RankSubject, todo: Sequence[Cell]) -> None:
        """All cells of one plan: compare with one rank, load, time. What fails becomes a row that says why."""
        open_cells = list(todo)
        while open_cells and self.left() > 0:
            try:
                self.keep([self._checked(subject)])
                self._run(sweep_work.prepare, subject, max(cell.tokens for cell in todo))
                while open_cells and self.left() > 0:
                    self.keep([self._timed(open_cells[0])])
                    del open_cells[0]
            except WrongResult as error:                                # none of its numbers would mean anything
                self.keep([row_of(cell, None, self.gpus, failed=_line(error)) for cell in open_cells])
                return
            except RankError as error:                                  # the rest is tried again with new ranks
                self.close()
                self.keep([row_of(open_cells.pop(0), None, self.gpus, failed=_line(error))])

    def _run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self._ranks is None:
            self._ranks = self._held.enter_context(Ranks(self.world, timeout=300))
        return self._ranks.run(work, *arguments)

    def _timed(self, cell: Cell) -> Row:
        if cell.kind == "prefill":
            readings = self._run(sweep_work.prefill, cell.tokens, cell.batch, self.repetitions)
        else:
            readings = self._run(sweep_work.decode, cell.tokens, cell.batch, self.steps)
            if isinstance(readings[0], str):
                return row_of(cell, None, self.gpus, failed=readings[0])
        return row_of(cell, readings, self.gpus)

    def _checked(self, subject: RankSubject) -> Row:
        """Compare the plan's logits of a small prompt with TP1 on the same machine; the row of suite "accuracy"."""
        ours = next(x for x in self._run(sweep_work.small_logits, subject) if x is not None)
        exact = self._one_rank(replace(subject, plan=Plan()))
        error = ((ours - exact).norm(dim=1) / exact.norm(dim=1)).median().item()
        limit = TOLERANCE["CPU" if not self.gpus else "fast on a GPU" if subject.fast else "plain on a GPU"]
        if not error <= limit:
            raise WrongResult(f"{subject.plan}: median relative error of the logits is {error:.3g}; at most {limit} is "
                              "right")
        same = (ours.argmax(dim=1) == exact.argmax(dim=1)).float().mean().item()
        return make_row("accuracy", "plan against one rank, 2 layers", subject.backend, "accuracy", [same],
                        "share of equal top-1", bound=1.0, statistic="single", median_relative_error=error,
                        tolerance=limit, **subject.conditions | {"tokens": sweep_work.CHECKED_TOKENS, "batch": 1})

    def _one_rank(self, alone: RankSubject) -> torch.Tensor:
        """The logits of one rank, computed once for all plans whose weights have the same forms."""
        if alone not in self._alone:
            with Ranks(1, "nccl" if self.gpus else "gloo", timeout=300) as one:
                self._alone[alone] = one.run(sweep_work.small_logits, alone)[0]
        return self._alone[alone]


class WrongResult(RuntimeError):
    """A plan whose logits are not those of one rank; nothing of it is timed."""


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]


def text(row: Row) -> str:
    """A row for people."""
    of = row["conditions"]
    where = f"EP{of.get('ep')} DP{of.get('dp')} TP{of.get('tp')}{' SP' if of.get('sequence_split') else ''}"
    value = f"failed: {of['failed']}" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
    bound = "" if row["bound"] is None else f"  bound {row['bound']:.3g}"
    return (f"{row['suite']:8} {of.get('model', ''):13} {where:18} {of.get('tokens', '')} x {of.get('batch', '')}  "
            f"{row['backend']:28} {value}{bound}")


def _key(row: Row) -> tuple[Any, ...]:
    of = row["conditions"]
    return (row["suite"], *(of.get(k) for k in ("model", "ep", "dp", "tp", "sequence_split", "tokens", "batch")))


def _cell_key(cell: Cell) -> tuple[Any, ...]:
    plan, name = cell.subject.plan, cell.subject.config.name
    return (cell.kind, name, plan.ep, plan.dp, plan.tp, plan.sequence_split, cell.tokens, cell.batch)
