"""`gptoss-lab chat`: Harmony in front of the engine. The answer goes to stdout, everything else to stderr.

Prompts are rendered to token ids, new ids are fed to the streaming parser as they come, and text of the channel `final`
is printed as soon as it is whole characters. The parser is lenient: what a model writes is shown, never rejected.
"""
from __future__ import annotations

import codecs
import datetime
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note
from gptoss_lab.cli.speed import Speed

if TYPE_CHECKING:
    from gptoss_lab.engine import Engine, SamplingParams
    from gptoss_lab.harmony import Message, StreamParser

RANDOM_TOKENS, TRAINED_TOKENS = 64, 4096
"""Default of --max-tokens: noise is not worth more."""
HEADER_TOKENS = 32
"""A header that is longer is none: the model does not write Harmony, and its text is shown as it is."""


def chat(
    once: Annotated[str | None, typer.Option("--once", help="Answer this and end, instead of a conversation.")] = None,
    reasoning: Annotated[Literal["low", "medium", "high"], typer.Option(help="How long the model is asked to think.")] = "medium",
    instructions: Annotated[str | None, typer.Option(help="Instructions for the whole conversation (developer message).")] = None,
    show_analysis: Annotated[bool, typer.Option("--show-analysis", help="Stream the other channels to stderr.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help=f"At most so many new tokens a turn. Default: {TRAINED_TOKENS}, or {RANDOM_TOKENS} with random weights.")] = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD, told to the model. Default: today.")] = None,
    stats: options.Stats = False,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    dtype: options.Precision = "auto",
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
    engine = load(path, device, dtype)
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
    parser, printer, speed = StreamParser(strict=False), _Printer(show_analysis), Speed(len(prompt))
    for event in speed.watch(engine.generate([prompt], sampling)):
        printer.token(event.token, parser)
    printer.finish(parser, cut=event.finish != "stop")
    if stats:
        note(speed.line())
    return [_kept(message) for message in parser.messages if message.role == "assistant"]


def _kept(message: Message) -> Message:
    """A message for the history; one that was not well formed is kept as what it said."""
    from gptoss_lab.harmony import assistant

    return message if message.problem is None else assistant(message.content)


class _Printer:
    """Prints a turn token by token. `answered`: whether text of the channel final was printed."""

    def __init__(self, show_analysis: bool) -> None:
        self.show_analysis = show_analysis
        self.answered = False
        self._ids: list[int] = []
        self._raw = None    # a UTF-8 decoder, once the text is shown as it is

    def token(self, token_id: int, parser: StreamParser) -> None:
        """Feed one token to the parser and print what it completed."""
        from gptoss_lab.harmony import MessageStart, TextDelta, token_bytes

        self._ids.append(token_id)
        for event in parser.feed(token_id):
            if isinstance(event, TextDelta) and self._raw is None:
                self._text(event.text, event.channel)
            elif isinstance(event, MessageStart) and self.show_analysis and event.channel != "final":
                print(f"\n[{_label(event.channel, event.recipient)}] ", end="", file=sys.stderr)
        if self._raw is not None:
            _write(self._raw.decode(token_bytes(token_id)))
        elif len(self._ids) == HEADER_TOKENS and not parser.messages and parser.header is None:
            self._give_up(f"no message has begun after {HEADER_TOKENS} tokens; this is the text as it comes")

    def finish(self, parser: StreamParser, cut: bool) -> None:
        """End the turn; where nothing was printed, print whatever the model wrote and say so."""
        from gptoss_lab.harmony import TextDelta

        for event in parser.finish():
            if isinstance(event, TextDelta) and self._raw is None:
                self._text(event.text, event.channel)
        if self.answered or self._raw is not None:
            print(flush=True)
        else:
            note(f"no text in the channel final after {len(self._ids)} tokens; this is what the model wrote")
            for message in parser.messages:
                _write(f"[{_label(message.channel, message.recipient)}] {message.content}\n")
        if cut:
            note("the model had not ended: --max-tokens is reached")

    def _text(self, text: str, channel: str | None) -> None:
        if channel == "final":
            self.answered = True
            _write(text)
        elif self.show_analysis:
            print(_printable(text, sys.stderr), end="", file=sys.stderr, flush=True)

    def _give_up(self, reason: str) -> None:
        from gptoss_lab.harmony import token_bytes

        note(reason)
        self._raw = codecs.getincrementaldecoder("utf-8")("replace")
        _write("".join(self._raw.decode(token_bytes(token)) for token in self._ids))


def _label(channel: str | None, recipient: str | None) -> str:
    return " to ".join(filter(None, (channel or "no channel", recipient)))


def _write(text: str) -> None:
    print(_printable(text, sys.stdout), end="", flush=True)


def _printable(text: str, stream) -> str:
    """Text without the control characters that could command a terminal; a pipe gets it unchanged."""
    if not stream.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
