"""From token ids to the parts of an answer: reasoning, content and tool calls, as they grow.

`Answer` feeds ids to the format's reader and turns its events into pieces that no longer depend on the format; both
APIs are written from these. What counts as what:
  - a message of the assistant to a tool, on any channel, is a call; "functions." is taken off its name;
  - the channel "analysis" is reasoning;
  - everything else is content: the channel final, remarks on commentary to nobody, and text without a channel.
So nothing that a model wrote is dropped, but for a header whose message was cut off before its first token, and
reasoning never mixes with the answer.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptoss_lab.harmony import Event, Message, MessageEnd, MessageStart, TextDelta, TruncatedHeaderError
from gptoss_lab.harmony.formats import ChatFormat
from gptoss_lab.harmony.messages import NOT_TOOLS
from gptoss_lab.serve.wire import Token

REASONING, CONTENT, CALL = "reasoning", "content", "call"
CUT = ("length", "context")     # why the engine stopped in the middle
LONGEST_HEADER = 64             # tokens that a header may take


@dataclass(frozen=True, slots=True)
class Opened:
    """A part begins. kind: "reasoning", "content" or "call"; channel: as written; name: of the function called."""

    kind: str
    channel: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Grown:
    """More text of the part that began last; tokens: those that it is made of, where it is content."""

    kind: str
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The part that began last is over; `message` is all of it."""

    kind: str
    message: Message


Piece = Opened | Grown | Closed


class Answer:
    """One answer in the making.

    messages: those that have ended. generated, reasoned: tokens so far, and those of them spent on reasoning, markers
    included. finish: why the engine stopped, None while it has not.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self.generated = self.reasoned = 0
        self.finish: str | None = None
        self._reader = chat.reader()
        self._kind = CONTENT
        self._unshown: list[Token] = []  # tokens of content whose text has not appeared yet
        self._in_message = 0

    @property
    def messages(self) -> list[Message]:
        """Messages that have ended."""
        return self._reader.messages

    @property
    def calls(self) -> list[Message]:
        """The tool calls among them that are whole."""
        return [message for message in self.messages if message.is_tool_call and message.end is not None]

    def feed(self, tokens: Sequence[Token]) -> list[Piece]:
        """Take the next tokens and return what they completed; the last one also ends the answer."""
        pieces: list[Piece] = []
        for token in tokens:
            self.generated += 1
            self._in_message += 1
            self._unshown.append(token)
            pieces += self._pieces(self._reader.feed(token.token))
            if token.finish is not None:
                self.finish = token.finish
                events = self._reader.finish()
                if token.finish in CUT and self._only_a_header(events):
                    self.messages.pop()                 # nothing of the message itself had come
                    self._unshown.clear()
                else:
                    pieces += self._pieces(events)
        return pieces

    def _only_a_header(self, events: Sequence[Event]) -> bool:
        """Whether what an answer was cut in is the beginning of a header. Text that never had one is content."""
        last = events[-1].message if events and isinstance(events[-1], MessageEnd) else None
        return (last is not None and isinstance(last.problem, TruncatedHeaderError)
                and self._in_message <= LONGEST_HEADER and (not last.content or last.content.startswith("<|channel|>")))

    def _pieces(self, events: Sequence[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for position, event in enumerate(events):
            if isinstance(event, MessageStart):
                self._kind = _kind(event)
                name = event.recipient.removeprefix("functions.") if self._kind == CALL else ""
                pieces.append(Opened(self._kind, event.channel, name))
                if not any(isinstance(later, TextDelta) for later in events[position:]):
                    self._unshown.clear()  # those of a header; one that was given up has become text
            elif isinstance(event, TextDelta):
                pieces.append(Grown(self._kind, event.text, tuple(self._unshown) if self._kind == CONTENT else ()))
                self._unshown.clear()
            elif isinstance(event, MessageEnd):
                pieces.append(Closed(self._kind, event.message))
                self._unshown.clear()
                self.reasoned += self._in_message if self._kind == REASONING else 0
                self._in_message = 0
        return pieces


def _kind(start: MessageStart) -> str:
    if start.role == "assistant" and start.recipient is not None and start.recipient not in NOT_TOOLS:
        return CALL
    return REASONING if start.channel == "analysis" else CONTENT


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces with texts that follow each other joined: one event of a stream instead of several."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Grown) and result and isinstance(result[-1], Grown):
            last = result[-1]
            result[-1] = Grown(last.kind, last.text + piece.text, last.tokens + piece.tokens)
        else:
            result.append(piece)
    return result
