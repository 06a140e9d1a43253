"""`gptoss-lab bench speculation`: drafts on a checkpoint, or the step times of real shapes."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note

if TYPE_CHECKING:
    from gptoss_lab.bench.fast_model import Subject
    from gptoss_lab.bench.speculation_drafts import Drafts

DRAFT_OF_SHAPES = "gpt-oss-20b"


def bench_speculation(
    checkpoint: options.Checkpoint = None,
    draft: Annotated[Path | None, typer.Option(help="Checkpoint of a smaller model that proposes.")] = None,
    noise: Annotated[float | None, typer.Option(help="Propose with a copy whose weights are off by this.")] = None,
    heads: Annotated[Path | None, typer.Option(help="A file of prediction heads that propose.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Only step times, for these shapes: 120b.")] = None,
    draft_shapes: Annotated[str, typer.Option(help="With --shapes: whose step is a proposal.")] = DRAFT_OF_SHAPES,
    draft_tokens: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1 2 4.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1 8; shapes 1 8 32.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="With --shapes: length so far.")] = 8192,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    temperature: options.Temperature = 0.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns of each decoder.")] = 3,
    forward: Annotated[Literal["auto", "plain", "fast"], typer.Option(help="auto: fast on a GPU.")] = "auto",
    experts: Annotated[Literal["fp8", "mxfp4", "dense"], typer.Option(help="Of the fast forward.")] = "mxfp4",
    layers: Annotated[int | None, typer.Option(min=1, help="With --shapes: so many layers.")] = None,
    device: options.Device = "auto",
    out: Annotated[Path, typer.Option(help="A .jsonl file that the rows are added to.")] = Path(
        "results/speculation.jsonl"),
) -> None:
    """Acceptance and speed-up of drafts, beside what acceptance and step times predict."""
    import torch

    from gptoss_lab.bench import speculation as suite
    from gptoss_lab.cli.loading import choose_checkpoint, pick_device

    where = pick_device(device)
    if shapes is not None:
        target, small = (_subject(name, layers, experts, where) for name in (shapes, draft_shapes))
        suite.steps(target, small, out, batch or (1, 8, 32), draft_tokens or (1, 2, 4), tokens)
    else:
        on_gpu = where.type == "cuda"
        chosen = ("fast" if on_gpu and noise is None else "plain") if forward == "auto" else forward
        cases = [suite.Case(k, b, new_tokens, temperature) for b in batch or (1, 8) for k in draft_tokens or (1, 2, 4)]
        try:
            suite.run(choose_checkpoint(checkpoint)[0], _drafts(draft, noise, heads), out, cases, device=where,
                      dtype=torch.bfloat16 if on_gpu else torch.float32, forward=chosen, experts=experts,
                      repetitions=repetitions)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    note(f"rows added to {out}")


def _drafts(draft: Path | None, noise: float | None, heads: Path | None) -> Drafts:
    from gptoss_lab.bench.speculation_drafts import Drafts

    return Drafts(draft, noise, heads)


def _subject(name: str, layers: int | None, experts: str, device: object) -> Subject:
    from gptoss_lab.bench.fast_model import Subject

    config = options.known_preset(name)
    return Subject(config if layers is None else config.with_layers(layers), experts, "dense", device)
