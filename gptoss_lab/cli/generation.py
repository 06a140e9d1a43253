"""`gptoss-lab generate`: token ids in, token ids out, as the engine itself has them."""
from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note
from gptoss_lab.cli.speed import Speed

Prompts = Annotated[list[str], typer.Argument(
    help="Token ids with commas, a prompt each: 1,2,3 4,5. A dash reads one prompt a line from stdin.")]
Draft = Annotated[Path | None, typer.Option(
    help="Checkpoint of a small model with the same vocabulary that proposes tokens: speculative decoding.")]
DraftTokens = Annotated[int, typer.Option(min=1, help="Tokens that it proposes at a time.")]
Stop = Annotated[list[int] | None, typer.Option(
    help="An id that ends a sequence; repeatable. Default: the model's own.")]


def generate(
    prompts: Prompts,
    max_tokens: Annotated[int, typer.Option(help="At most so many new tokens for each prompt.")] = 32,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: Stop = None,
    no_stop: Annotated[bool, typer.Option("--no-stop", help="Stop at no id, only at --max-tokens.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON line for each token, as it is found.")] = False,
    stats: options.Stats = False,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    dtype: options.Precision = "auto",
    forward: options.Forward = "auto",
) -> None:
    """Continue prompts given as token ids: one line of ids for each prompt, in their order."""
    from gptoss_lab.cli.loading import choose_checkpoint, load

    ids = [_ids(text) for text in (sys.stdin.read().split("\n") if prompts == ["-"] else prompts) if text.strip()]
    if not ids:
        raise typer.BadParameter("no prompt given", param_hint="PROMPTS")
    sampling = options.sampling_params(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_new_tokens=max_tokens,
        stop_ids=() if no_stop else tuple(stop) if stop else None, logprobs=logprobs,
    )
    most = sum(len(prompt) + sampling.max_new_tokens for prompt in ids)
    engine = load(choose_checkpoint(checkpoint)[0], device, dtype, draft, draft_tokens, forward=forward,
                  sequences=len(ids), positions=most)
    speed = Speed(sum(map(len, ids)))
    events = speed.watch(engine.generate(ids, sampling))
    if json:
        for event in events:
            print(json_module.dumps(asdict(event)), flush=True)
    else:
        _print_lines(events, len(ids))
    if stats:
        note(speed.line())
        if draft is not None:
            counts = engine.decoder.acceptance
            note(f"{counts.accepted} of {counts.proposed} proposals accepted, "
                 f"{counts.tokens_per_round:.2f} tokens a round")


def _print_lines(events: Iterable, count: int) -> None:
    lines: list[list[int]] = [[] for _ in range(count)]
    for event in events:
        lines[event.sequence].append(event.token)
    for line in lines:
        print(",".join(map(str, line)))


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r:.60}: token ids with commas are expected, such as 1,2,3",
                                 param_hint="PROMPTS") from None
