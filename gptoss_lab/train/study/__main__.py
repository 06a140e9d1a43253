"""python -m gptoss_lab.train.study --checkpoint PATH --out FILE.jsonl [--problems N] [--identical]

PATH: a checkpoint folder in MXFP4, or the compact file of a trained model. Rows of a variant are written when it is
finished, so a run that is stopped keeps those that are done. --identical runs the FP8-exact weights alone and fails
unless every greedy token of every prompt is the MXFP4 model's.
"""
from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint import CheckpointError, open_checkpoint
from gptoss_lab.results import write_rows
from gptoss_lab.train.dialogues import Dialogue, Rendered, render_dialogue, training_dialogue
from gptoss_lab.train.evaluate import attempt, held_out_set
from gptoss_lab.train.settings import Settings
from gptoss_lab.train.study import measure
from gptoss_lab.train.study.rows import Outcome, checksum, identical, outcome_rows
from gptoss_lab.train.study.source import Rows, find_rows
from gptoss_lab.train.study.variants import BASELINE, Forms, Variant, build, choose
from gptoss_lab.train.study.verdicts import effects, verdicts

CALIBRATION = 16
"""Training dialogues on which the scales of an FP8 cache are measured."""


@dataclass(frozen=True)
class Study:
    """What all variants share. dialogues: the problems, the last `far` of them beyond 4,096 tokens. rendered: the same
    with their right answers. answer_tokens: that an answer may have.
    """

    forms: Forms
    rows: Rows
    dialogues: Sequence[Dialogue]
    far: int
    rendered: Sequence[Rendered]
    calibration: Sequence[Sequence[int]]
    answer_tokens: int
    device: torch.device

    def run(self, variant: Variant, baseline: Outcome | None) -> Outcome:
        """Build the variant, let it answer, read the right answers with it."""
        began = time.monotonic()
        model = build(variant, self.forms, self.rows, self.calibration, self.device)
        known = None if baseline is None else baseline.reading
        reading = measure.read(model, self.rendered, self.rows, variant.batch, known)
        generate = measure.writer(model, self.rows, self.answer_tokens, variant.batch)
        attempts = attempt(self.dialogues, generate)
        return Outcome(variant, attempts, self.far, reading, time.monotonic() - began)


def prepare(
    checkpoint: Path, folder: Path, problems: int, far: int, seed: int = 0, device: str = "cpu",
    answer_tokens: int = Settings().answer_tokens,
) -> Study:
    """Everything that does not depend on a variant. folder: for converted weights."""
    forms = Forms(checkpoint, folder)
    rows = find_rows(open_checkpoint(forms.path("mxfp4")))
    dialogues = [*held_out_set(problems, seed), *(held_out_set(far, seed, far=True) if far else ())]
    rng = random.Random(f"study/{seed}")
    rendered = [render_dialogue(d, rng) for d in dialogues]
    calibration = [rows.compact(render_dialogue(training_dialogue(rng), rng).ids) for _ in range(CALIBRATION)]
    return Study(forms, rows, dialogues, far, rendered, calibration, answer_tokens, torch.device(device))


def outcomes(study: Study, variants: Sequence[Variant]) -> Iterator[tuple[Outcome, Outcome]]:
    """(outcome, the baseline's), the baseline itself first."""
    baseline = study.run(BASELINE, None)
    yield baseline, baseline
    for variant in variants:
        yield study.run(variant, baseline), baseline


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        variants = choose(["FP8 exact"] if given.identical else given.variant)
        with tempfile.TemporaryDirectory() as folder:
            study = prepare(given.checkpoint, Path(folder), given.problems, given.far, given.seed, given.device)
            return _run(study, variants, given)
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(study: Study, variants: Sequence[Variant], given: argparse.Namespace) -> int:
    shared = {
        "model": open_checkpoint(study.forms.path("mxfp4")).config.name, "seed": given.seed, "dtype": "bf16",
        "checkpoint": checksum(study.forms.path("mxfp4")), "device": study.device.type,
    }
    rows: list[dict[str, Any]] = []
    different = 0
    for outcome, baseline in outcomes(study, variants):
        rows += (new := outcome_rows(outcome, baseline, **shared))
        write_rows(given.out, new)
        same = identical(outcome, baseline)
        different += len(outcome.attempts) - same
        right = sum(bool(a.done) for a in outcome.attempts)
        print(f"{outcome.variant.name}: {right:,} of {len(outcome.attempts):,} right, {same:,} token by token as the "
              f"baseline, {outcome.seconds:.1f} s", flush=True)
    print()
    print("\n".join(f"{e.variant} changes {e.changes}: {e.words}" for e in effects(rows).values()))
    print()
    print("\n".join(v.sentence for v in verdicts(rows)))
    return int(given.identical and different > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gptoss_lab.train.study", description="The accuracy study.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder in MXFP4, or a compact file")
    parser.add_argument("--out", type=Path, required=True, help="result rows are appended to this .jsonl file")
    parser.add_argument("--problems", type=_at_least(1), default=1_000, help="held-out problems (default 1,000)")
    parser.add_argument("--far", type=_at_least(0), default=0, help="problems of recall beyond 4,096 tokens besides "
                        "(default 0: on a CPU one takes some 10 s for each variant)")
    parser.add_argument("--variant", action="append", help="only this one, may be repeated (default: all)")
    parser.add_argument("--identical", action="store_true", help="FP8 exact alone; fails if one token differs")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} problems; at least {least} is needed")
        return number

    return count


if __name__ == "__main__":
    sys.exit(main())
