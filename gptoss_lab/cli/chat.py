"""`gptoss-lab chat`: Harmony in front of the engine. The answer goes to stdout, everything else to stderr.

Prompts are rendered to token ids, new ids are fed to the streaming parser as they come, and text of the channel `final`
is printed as soon as it is whole characters. The parser is lenient: what a model writes is shown, never rejected.
"""
from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note
from gptoss_lab.cli.speed import Speed
from gptoss_lab.cli.turn import Turn

if TYPE_CHECKING:
    from gptoss_lab.engine import Engine, SamplingParams
    from gptoss_lab.harmony import Message

RANDOM_TOKENS, TRAINED_TOKENS = 64, 4096
"""Default of --max-tokens: noise is not worth more."""

Once = Annotated[str | None, typer.Option("--once", help="Answer this and end, instead of a conversation.")]
Reasoning = Annotated[Literal["low", "medium", "high"], typer.Option(help="How long the model is asked to think.")]
Instructions = Annotated[str | None, typer.Option(help="For the whole conversation (the developer message).")]
ShowAnalysis = Annotated[bool, typer.Option("--show-analysis", help="Stream the other channels to stderr.")]
MaxTokens = Annotated[int | None, typer.Option(
    help=f"At most so many new tokens a turn. Default: {TRAINED_TOKENS}, or {RANDOM_TOKENS} with random weights.")]
Date = Annotated[str | None, typer.Option(help="YYYY-MM-DD, told to the model. Default: today.")]


def chat(
    once: Once = None,
    reasoning: Reasoning = "medium",
    instructions: Instructions = None,
    show_analysis: ShowAnalysis = False,
    max_tokens: MaxTokens = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    date: Date = None,
    stats: options.Stats = False,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    dtype: options.Precision = "auto",
    forward: options.Forward = "auto",
) -> None:
    """Talk to a model; its answer streams. Ends at the end of the input (Ctrl-D)."""
    from gptoss_lab.cli.loading import choose_checkpoint, load
    from gptoss_lab.harmony import developer, engine_stop_ids, system, user

    messages = [system(reasoning, date or datetime.date.today())]
    messages += [developer(instructions)] if instructions else []
    path, random = choose_checkpoint(checkpoint)
    default = RANDOM_TOKENS if random else TRAINED_TOKENS
    sampling = options.sampling_params(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        max_new_tokens=default if max_tokens is None else max_tokens, stop_ids=tuple(sorted(engine_stop_ids())),
    )
    engine = load(path, device, dtype, forward=forward)
    if random:
        note("the weights are random: the answer is noise, only the machinery is real")
    for text in _turns(once):
        messages.append(user(text))
        messages += _answer(engine, messages, sampling, show_analysis, stats)


def _turns(once: str | None) -> Iterator[str]:
    """What the user says, turn by turn."""
    if once is not None:
        yield once
        return
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    engine: Engine, messages: list[Message], sampling: SamplingParams, show_analysis: bool, stats: bool
) -> list[Message]:
    """Generate one turn, print it as it comes, and return it as the history of the next."""
    from gptoss_lab.harmony import StreamParser, render

    prompt = render(messages)
    parser, turn, speed = StreamParser(strict=False), Turn(show_analysis), Speed(len(prompt))
    for event in speed.watch(engine.generate([prompt], sampling)):
        turn.token(event.token, parser)
    turn.finish(parser, event.finish)
    if stats:
        note(speed.line())
    return [_kept(message) for message in parser.messages if message.role == "assistant"]


def _kept(message: Message) -> Message:
    """A message for the history; one that was not well formed is kept as what it said."""
    from gptoss_lab.harmony import assistant

    return message if message.problem is None else assistant(message.content)
