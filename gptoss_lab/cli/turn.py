"""One turn of the model, printed as it is written: the answer on stdout, everything else on stderr.

The parser is lenient and the printing too: a model that does not keep to Harmony, or ends before its answer, still has
its text shown, and a line says why it looks so.
"""
from __future__ import annotations

import codecs
import sys
from typing import TYPE_CHECKING, TextIO

from gptoss_lab.cli.output import note

if TYPE_CHECKING:
    from gptoss_lab.harmony import Event, StreamParser

HEADER_TOKENS = 32
"""A header that is longer is none: the model does not write Harmony, and its text is shown as it is."""
CUT = {
    "length": "the model had not ended: --max-tokens is reached",
    "context": "the model had not ended: its length is reached",
}


class Turn:
    """Prints a turn token by token.

    show_analysis: the other channels too. answered: whether text of the channel final was printed.
    """

    def __init__(self, show_analysis: bool) -> None:
        self.show_analysis = show_analysis
        self.answered = False
        self._ids: list[int] = []
        self._raw: codecs.IncrementalDecoder | None = None    # once the text is shown as it is

    def token(self, token_id: int, parser: StreamParser) -> None:
        """Feed one token to the parser and print what it completed."""
        from gptoss_lab.harmony import token_bytes

        self._ids.append(token_id)
        for event in parser.feed(token_id):
            self._event(event)
        if self._raw is not None:
            _write(self._raw.decode(token_bytes(token_id)))
        elif len(self._ids) == HEADER_TOKENS and not parser.messages and parser.header is None:
            self._give_up(f"no message has begun after {HEADER_TOKENS} tokens; this is the text as it comes")

    def finish(self, parser: StreamParser, reason: str) -> None:
        """End the turn, for the engine's reason; where no answer was printed, print what the model wrote and say so."""
        for event in parser.finish():
            self._event(event)
        if self.answered or self._raw is not None:
            print(flush=True)
        else:
            note(f"no text in the channel final after {len(self._ids)} tokens; this is what the model wrote")
            for message in parser.messages:
                _write(f"[{_label(message.channel, message.recipient)}] {message.content}\n")
        if reason in CUT:
            note(CUT[reason])

    def _event(self, event: Event) -> None:
        """Print text of the answer to stdout; the rest to stderr, under the name of its channel."""
        from gptoss_lab.harmony import MessageEnd, MessageStart, TextDelta

        if self._raw is not None:
            return
        match event:
            case TextDelta(text=text, channel="final"):
                self.answered = True
                _write(text)
            case TextDelta(text=text):
                self._aside(text)
            case MessageStart(channel=channel, recipient=recipient) if channel != "final":
                self._aside(f"[{_label(channel, recipient)}] ")
            case MessageEnd(message=message) if message.channel != "final":
                self._aside("\n")

    def _aside(self, text: str) -> None:
        if self.show_analysis:
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


def _printable(text: str, stream: TextIO) -> str:
    """Text without the control characters that could command a terminal; a pipe gets it unchanged."""
    if not stream.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
