"""Train the nano model, its heads and its draft model, measure them and write what is shipped: one command.

    python -m gptoss_lab.train.run --out OTHER --rehearse         on a GPU, a minute: does it work, and how fast?
    python -m gptoss_lab.train.run --out DIR --minutes 9          on a GPU; the schedule fills the time that is given
    python -m gptoss_lab.train.run --out DIR --smoke              on a CPU, a tiny model: does every step work?

DIR gets nano.safetensors, mtp.safetensors and draft.safetensors, each as soon as it is trained, then evaluation.json,
README.md, and train.jsonl all along. Held-out problems are answered some hundred at a time until the time is up, so a
slow machine measures fewer and says how many. What is needed to go on after an interruption lies in DIR.state; the same
command again goes on from there.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint.compact import write_compact
from gptoss_lab.checkpoint.writer import write_json
from gptoss_lab.config import ModelConfig
from gptoss_lab.results import shown_command
from gptoss_lab.train import experts
from gptoss_lab.train.attention import FORMS, choose_form
from gptoss_lab.train.batches import stream
from gptoss_lab.train.card import model_card
from gptoss_lab.train.dialogues import Dialogue, prompt_of
from gptoss_lab.train.dialogues.words import WORDS
from gptoss_lab.train.evaluate import Attempt, attempt, held_out_set, summary
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.loop import Clock, Log, Trainee, run_phase, snapshot, write_state
from gptoss_lab.train.measure import attention_scores, busiest_expert, draft_agreement, heads_accuracy, packed_dialogues
from gptoss_lab.train.model import Pointwise, TrainedModel
from gptoss_lab.train.mtp import PredictionHeads, save_heads
from gptoss_lab.train.optimiser import Optimiser
from gptoss_lab.train.served import served_agreement, writer
from gptoss_lab.train.settings import PHASES, REHEARSAL, SMOKE, Settings
from gptoss_lab.train.trainees import HeadsTrainee, ModelTrainee, next_token_scores
from gptoss_lab.train.vocabulary import Vocabulary, training_vocabulary

MODEL_LIMIT, SMALL_LIMIT = 16_000_000, 8_000_000
"""Bytes that may be shipped of the model, and of the draft model and the heads each."""
SERVED_PROMPTS, SERVED_TOKENS = 8, 64
"""Of the last check, which runs on the CPU."""
READ, SCORED = 1_000, 20
"""Held-out dialogues whose right answers are read for loss and agreement, and whose attention is looked at."""
AT_A_TIME = 1_000
"""Held-out problems that are answered together; after each such lot the clock is looked at."""
LAST_SECONDS = 20.0
"""Of the time given, for what comes after the problems."""


@dataclass
class Run:
    """Everything the phases share. out: where the files go. form: of attention. began: monotonic seconds."""

    settings: Settings
    out: Path
    seed: int
    device: torch.device
    dtype: torch.dtype
    form: str
    vocabulary: Vocabulary
    log: Log
    minutes: float
    began: float
    pointwise: Pointwise

    @property
    def out_of_time(self) -> bool:
        """Whether no more problems should be answered; never where steps are counted instead of time."""
        over = self.began + 60 * self.minutes - LAST_SECONDS
        return self.settings.steps is None and time.monotonic() > over

    @property
    def state_file(self) -> Path:
        """Beside the output, so that what is shipped stays small."""
        return self.out.with_name(self.out.name + ".state") / "state.pt"

    def model(self, config: ModelConfig) -> TrainedModel:
        """A fresh model on the device."""
        v = self.vocabulary
        return TrainedModel(config, v.rows, v.others, dtype=self.dtype, seed=self.seed, pointwise=self.pointwise).to(
            self.device)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gptoss_lab.train.run", description="Train the nano checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is shipped")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall time of the whole command (default 9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=("auto", *FORMS), default="auto")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--tokens", type=int, help="tokens of a batch")
    parser.add_argument("--workers", type=int, help="processes that make batches")
    parser.add_argument("--evaluation", type=int, help="held-out problems at the end")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--smoke", action="store_true", help="a tiny model and few steps: does every step work?")
    kind.add_argument("--rehearse", action="store_true", help="the real sizes, few steps: does it work, and how fast?")
    given = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    command = shown_command(["python", "-m", "gptoss_lab.train.run", *words])
    chosen = {k: v for k in ("tokens", "workers", "evaluation") if (v := getattr(given, k)) is not None}
    settings = replace(SMOKE if given.smoke else REHEARSAL if given.rehearse else Settings(), **chosen)
    run = prepare(
        settings, given.out, given.seed, given.device, given.minutes, given.attention, compiled=not given.eager,
    )
    train_and_write(run, command)
    if given.rehearse:
        run.log(event="forecast", **forecast(run))
    return 0


def forecast(run: Run) -> dict[str, float]:
    """What the model's phase of the whole run would do at the median speed of this one."""
    speeds = [row["tokens_per_second"] for row in run.log.rows if row.get("phase") == "model" and "loss" in row]
    start = next(row["seconds"] for row in run.log.rows if row.get("event") == "start")
    seconds = (60 * run.minutes - Settings().spare - start) * Settings().shares[0]
    tokens = seconds * sorted(speeds)[len(speeds) // 2]
    return {"minutes": run.minutes, "model_seconds": seconds, "tokens": tokens, "steps": tokens / run.settings.tokens}


def prepare(
    settings: Settings, out: Path, seed: int = 0, device: str = "cpu", minutes: float = 9.0, attention: str = "auto",
    compiled: bool = True,
) -> Run:
    """Vocabulary, device, attention form, log. On a GPU bf16 and compiled pointwise operations, else fp32 and plain."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    vocabulary = training_vocabulary(settings.vocabulary_sample)
    form, reason = choose_form(where, dtype, attention)
    if where.type == "cuda" and form == "reference" and attention == "auto":
        raise SystemExit(f"no quick attention with gradients here: {reason}; --attention reference trains without one, "
                         "many times slower")
    plain = not compiled or where.type != "cuda"
    pointwise, kernels = (Pointwise(), "plain") if plain else Pointwise.compiled(where)
    experts.GROUPED_KERNEL, products = experts.choose_product(where)
    log = Log(out / "train.jsonl")
    log(event="start", seed=seed, gpu=_gpu(where), versions=_versions(), attention=form, why=reason,
        pointwise=kernels, products=products, vocabulary=vocabulary.shared, seconds=time.monotonic() - began)
    return Run(settings, out, seed, where, dtype, form, vocabulary, log, minutes, began, pointwise)


def train_and_write(run: Run, command: str) -> dict[str, Any]:
    """The three phases, the measurements, the files. Returns the report that evaluation.json holds."""
    s, model = run.settings, run.model(run.settings.model)
    heads = PredictionHeads(s.model.hidden_size, s.model.rms_norm_eps, seed=run.seed).to(run.device)
    draft = run.model(s.draft)
    trainees: tuple[Trainee, ...] = (
        ModelTrainee(model, s.balance, run.form), HeadsTrainee(heads, model, run.form),
        ModelTrainee(draft, s.balance, run.form),
    )
    trained = (model, heads, draft)
    state = _load_state(run)
    training = 0.0, 0
    for index, (name, trainee, module) in enumerate(zip(PHASES, trainees, trained, strict=True)):
        clock = _phase(run, state, index, name, trainee, module)
        if index == 0:
            training = clock.used, clock.step
        if isinstance(module, TrainedModel):
            module.store()
            module.pointwise = Pointwise()          # no new compilations for the shapes of an evaluation
            write_model(run, module, "nano" if module is model else "draft")
        else:
            save_heads(heads, run.out / "mtp.safetensors")
    report = measure(run, model, heads, draft)
    report["training"] |= {"seconds": training[0], "steps": training[1]}
    return write(run, report | {"command": command}, model)


def _phase(
    run: Run, state: dict[str, Any], index: int, name: str, trainee: Trainee, module: torch.nn.Module
) -> Clock:
    """One phase, from its beginning or from where the state has it; skipped when the state has it finished."""
    s = run.settings
    seconds = state["seconds"] * s.shares[index]
    done = state["done"].get(name)
    if done is not None:
        trainee.load(done["trainee"])
        return Clock(seconds, used=done["used"], step=done["step"])
    optimiser = Optimiser(module.named_parameters(), muon=s.muon if name != "heads" else 0.0, adamw=s.adamw,
                          head_dim=s.model.head_dim)
    clock = Clock(seconds, None if s.steps is None else s.steps[index])
    current = state.pop("current", None)
    if current is not None and current["phase"] == name:
        trainee.load(current["trainee"])
        optimiser.load_state_dict(current["optimiser"])
        clock.used, clock.step, clock.falls = current["used"], current["step"], current["falls"]
    batches = stream(
        run.seed * len(PHASES) + index, s.tokens, run.vocabulary, s.model.max_position_embeddings, first=clock.step,
        workers=s.workers,
    )
    run_phase(name, trainee, optimiser, batches, clock, s, run.log,
              save=lambda now: write_state(run.state_file, state | {"current": now}))
    state["done"][name] = {k: v for k, v in snapshot(name, trainee, optimiser, clock).items() if k != "optimiser"}
    write_state(run.state_file, state)
    return clock


def _load_state(run: Run) -> dict[str, Any]:
    """The state of an interrupted run, if it was the same run; else a fresh one with the seconds for training."""
    plan = {"seed": run.seed, "settings": repr(run.settings)}
    if not run.state_file.exists():
        left = run.minutes * 60 - run.settings.spare - (time.monotonic() - run.began)
        if left <= 0 and run.settings.steps is None:
            raise SystemExit(f"--minutes {run.minutes}: nothing is left for training after {run.settings.spare:.0f} s "
                             "for measuring; give more")
        return {"plan": plan, "seconds": left, "done": {}}
    state = torch.load(run.state_file, map_location=run.device, weights_only=True)
    if state["plan"] != plan:
        raise SystemExit(f"{run.state_file} is of another run (seed, settings); remove it or name another --out")
    run.log(event="resume", done=sorted(state["done"]), step=state.get("current", {}).get("step", 0))
    return state


def measure(run: Run, model: TrainedModel, heads: PredictionHeads, draft: TrainedModel) -> dict[str, Any]:
    """Everything the card says, from held-out dialogues."""
    s, c, v = run.settings, run.settings.model, run.vocabulary
    dialogues = held_out_set(s.evaluation, run.seed)
    batches = packed_dialogues(dialogues[:READ], v, s.tokens)
    return {
        **summary(answered(run, model, dialogues)),
        "held_out": next_token_scores(model, batches, run.form),
        "held_out_draft": next_token_scores(draft, batches, run.form),
        "heads_accuracy": heads_accuracy(heads, model, batches, run.form),
        "draft_agreement": draft_agreement(model, draft, batches, run.form),
        "busiest_expert": busiest_expert(model, batches[0], run.form),
        "attention": attention_scores(model, packed_dialogues(dialogues[:SCORED], v, s.tokens)[0]),
        "model": {
            "name": c.name, "layers": c.num_layers, "hidden": c.hidden_size, "intermediate": c.intermediate_size,
            "experts": c.num_experts, "chosen": c.experts_per_token, "heads": c.num_heads, "kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim, "vocabulary": c.vocab_size, "kept": v.shared,
        },
        "training": {
            "tokens": s.tokens, "quantised_from": s.quantise_from, "settings": {
                k: x for k, x in asdict(s).items() if k not in ("model", "draft")},
            "learned_share": sum(int(b.learned.sum()) for b in batches) / sum(len(b.rows) for b in batches),
        },
        "seed": run.seed, "gpu": _gpu(run.device), "versions": _versions(), "words": len(WORDS),
    }


def answered(run: Run, model: TrainedModel, dialogues: Sequence[Dialogue]) -> list[Attempt]:
    """The model's attempts at the problems and, after the first lot, at those beyond 4,096 tokens: as many as there is
    time for, one lot at least.
    """
    s, generate = run.settings, writer(model, run.vocabulary, run.settings.answer_tokens, run.form)
    attempts: list[Attempt] = []
    for start in range(0, len(dialogues), AT_A_TIME):
        if attempts and run.out_of_time:
            run.log(event="out of time", answered=start, of=len(dialogues))
            break
        attempts += attempt(dialogues[start : start + AT_A_TIME], generate)
        if start == 0 and s.far and not run.out_of_time:
            attempts += attempt(held_out_set(s.far, run.seed, far=True), generate)
    return attempts


def write_model(run: Run, model: TrainedModel, name: str) -> None:
    """The compact checkpoint of a model; CheckpointError if it is larger than may be shipped."""
    limit = MODEL_LIMIT if name == "nano" else SMALL_LIMIT
    ids = torch.from_numpy(run.vocabulary.token_ids)
    write_compact(run.out / f"{name}.safetensors", model.config, ids, released_tensors(model), limit)


def write(run: Run, report: dict[str, Any], model: TrainedModel) -> dict[str, Any]:
    """The report and the card; then whether the lab's engine writes what the trained model wrote."""
    out = run.out
    report["bytes"] = {file.name: file.stat().st_size for file in sorted(out.glob("*.safetensors"))}
    (out / "README.md").write_text(model_card(report), encoding="utf-8")
    write_json(out / "evaluation.json", report)
    prompts = [prompt_of(d) for d in held_out_set(SERVED_PROMPTS, run.seed + 1)]
    report["served"] = served_agreement(
        out / "nano.safetensors", model, run.vocabulary, prompts, min(SERVED_TOKENS, run.settings.answer_tokens)
    )
    report["wall_seconds"] = time.monotonic() - run.began
    write_json(out / "evaluation.json", report)
    run.log(event="end", wall_seconds=report["wall_seconds"], well_formed=report["well_formed"]["share"],
            exact_match=report["exact_match"]["all"]["share"],
            served=min(s["share"] for s in report["served"].values()))
    return report


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _versions() -> str:
    return f"Python {sys.version.split()[0]}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
