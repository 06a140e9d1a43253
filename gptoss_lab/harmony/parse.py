"""Token ids to messages, at once or one id at a time.

What: `StreamParser` takes ids one by one and says what each of them completed; `parse` does it for a finished list.
How: a machine of three states over ids, never over decoded text:

    between --<|start|>--> header --<|message|>--> body --<|end|>, <|return|>, <|call|>--> between

A body's bytes go through an incremental UTF-8 decoder, so a character spread over tokens appears when it is whole.

strict (default): what does not follow the format raises a `ParseError` that carries the text and the messages before.
lenient: nothing raises, and every character that the model wrote is a field or the text of a message:
  - a header that ends without <|message|>: all of it after the role is the message's text, markers spelled out;
  - a header with words that have no meaning: they are a message of their own, before the one whose header it is;
  - text where <|start|> should stand: a header of the assistant begins without it;
  - <|start|> inside a body: the message ends there and the next begins; other markers inside a body are spelled out.
  `Message.problem` of such a message is the error that strict mode raises.
In both: a body cut by the end of the input is a message whose `end` is None; a spare <|end|>, <|return|>, <|call|> or
<|endoftext|> between messages carries no text and is passed over.

Why not the reference's parser: it loses a message whose header it cannot read, and the text after it, in both its
modes. It is the oracle of this one for well-formed input.
What is lost: text of a header without <|message|> appears only when the header is given up, not token by token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from gptoss_lab.harmony.errors import (
    BadHeaderError,
    HarmonyError,
    MissingHeaderError,
    ParseError,
    TruncatedHeaderError,
    UnexpectedTokenError,
)
from gptoss_lab.harmony.header import Header, is_role, read_header, segments, split_role
from gptoss_lab.harmony.ids import END_OF_TEXT, FIRST_SPECIAL, MESSAGE, START, TERMINATORS, check_id
from gptoss_lab.harmony.messages import Message
from gptoss_lab.harmony.vocabulary import decode, encode, token_bytes

BETWEEN, HEADER, BODY, DONE = "between", "header", "body", "done"
"""The states of a `StreamParser`."""


@dataclass(frozen=True, slots=True)
class MessageStart:
    """A header was read: everything about the message except its text is known."""

    role: str
    name: str | None
    channel: str | None
    recipient: str | None
    content_type: str | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the message that began last; its channel and recipient are repeated. Never empty."""

    text: str
    channel: str | None
    recipient: str | None


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The message that began last is over; `message` is all of it."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The message that just ended calls a tool. name: as addressed, `functions.f`. arguments: the body's text."""

    name: str
    arguments: str
    message: Message


Event = MessageStart | TextDelta | MessageEnd | ToolCall


def parse(ids: Iterable[int], role: str | None = "assistant", *, strict: bool = True) -> list[Message]:
    """Return the messages in a finished list of ids.

    ids: what the model wrote after a prompt that ends with <|start|> and `role`, or, with `role=None`, a whole
        conversation. strict: see the module's text.
    Raises, in strict mode, a `ParseError` carrying the raw text from the failed message to the end of `ids` and the
    messages before it; in both modes `TokenIdError` for an id that the model does not have.
    """
    ids = [check_id(i) for i in ids]
    parser = StreamParser(role, strict=strict)
    for position, token_id in enumerate(ids):
        try:
            parser.feed(token_id)
        except ParseError as error:
            whole = [*error.ids, *ids[position + 1 :]]
            raise type(error)(error.reason, whole, decode(whole), error.messages) from None
    parser.finish()
    return parser.messages


class StreamParser:
    """Reads ids one at a time. `role` and `strict` as in `parse`.

    state: "between", "header", "body" or "done". header: the `Header` of the message whose body is being read, else
    None. messages: list of the messages that have ended so far.
    """

    def __init__(self, role: str | None = "assistant", *, strict: bool = True):
        self.strict = strict
        self.state = BETWEEN
        self.header: Header | None = None
        self.messages: list[Message] = []
        self._ids: list[int] = []  # the message's tokens so far, with <|start|> and the role
        self._header_from = 0  # where in _ids the header's own ids begin
        self._given_role: str | None = None  # the role, when no word of the header names it
        self._problem: ParseError | None = None  # the first one of this message
        self._pieces: list[str] = []  # the body's text so far
        self._decoder = _utf8_decoder()
        if role is not None:
            self._open_header([START, *encode(role)], role)

    def feed(self, token_id: int) -> list[Event]:
        """Take one id and return what it completed: often nothing, mostly one `TextDelta`.

        Raises `TokenIdError`; in strict mode a `ParseError`, after which the parser takes no more.
        """
        token_id = check_id(token_id)
        if self.state == BODY:
            return self._feed_body(token_id)
        if self.state == HEADER:
            return self._feed_header(token_id)
        if self.state == BETWEEN:
            return self._feed_between(token_id)
        raise HarmonyError("the parser is done; make a new one for the next completion")

    def finish(self) -> list[Event]:
        """Say that the input has ended, and return what that completed.

        Raises, in strict mode, `TruncatedHeaderError` when it ended inside a header, or before anything was written.
        """
        events = []
        if self.state == BODY:
            events = self._end_message(None)
        elif self.state == HEADER:
            events = self._give_up_header(None)
        self.state = DONE
        return events

    # One method for each state

    def _feed_between(self, token_id: int) -> list[Event]:
        if token_id == START:
            self._open_header([START], None)
            return []
        if token_id in TERMINATORS:
            return []
        self._open_header([], "assistant")
        self._complain(UnexpectedTokenError, f"expected <|start|>, got {decode([token_id])!r}", token_id)
        return self._feed_header(token_id)

    def _feed_header(self, token_id: int) -> list[Event]:
        if token_id == START:
            return self._restart()
        if token_id in TERMINATORS:
            return self._give_up_header(token_id)
        self._ids.append(token_id)
        return self._open_body() if token_id == MESSAGE else []

    def _feed_body(self, token_id: int) -> list[Event]:
        if token_id in TERMINATORS:
            return self._end_message(token_id)
        if token_id == START:
            self._complain(UnexpectedTokenError, "<|start|> before the end of the message", START)
            events = self._end_message(START)
            self._open_header([START], None)
            return events
        if token_id >= FIRST_SPECIAL:
            self._complain(UnexpectedTokenError, f"{decode([token_id])} inside a message", token_id)
        self._ids.append(token_id)
        return self._text(self._decoder.decode(token_bytes(token_id)))

    # What the states share

    def _restart(self) -> list[Event]:
        """Begin a header inside another. One that holds nothing yet leaves no message, only its problem to the next."""
        if len(self._ids) > self._header_from:
            events, problem = self._give_up_header(START), None
        else:
            self._complain(MissingHeaderError, "<|start|> before <|message|>", START)
            events, problem = [], self._problem
        self._open_header([START], None)
        self._problem = problem
        return events

    def _open_header(self, ids: list[int], given_role: str | None) -> None:
        self.state, self.header = HEADER, None
        self._ids, self._header_from, self._given_role = ids, len(ids), given_role
        self._problem, self._pieces, self._decoder = None, [], _utf8_decoder()

    def _open_body(self) -> list[Event]:
        header = read_header(self._ids[self._header_from : -1], self._given_role)
        if header.problem is not None:
            self._complain(BadHeaderError, header.problem)
        return self._unread(header.unread) + self._begin(header)

    def _unread(self, text: str) -> list[Event]:
        """Return the events of a message that holds what could not be read of the next one's header."""
        if not text:
            return []
        message = Message("assistant", text, problem=self._problem)
        self.messages.append(message)
        return [MessageStart("assistant", None, None, None, None), TextDelta(text, None, None), MessageEnd(message)]

    def _begin(self, header: Header) -> list[Event]:
        self.state, self.header = BODY, header
        return [MessageStart(header.role, header.name, header.channel, header.recipient, header.content_type)]

    def _give_up_header(self, end: int | None) -> list[Event]:
        """End a message that has no <|message|>: its header, after the role, is its text."""
        if end is None or end == END_OF_TEXT:
            self._complain(TruncatedHeaderError, "the input ended before <|message|>", end)
        else:
            self._complain(MissingHeaderError, f"{decode([end])} before <|message|>", end)
        header, text = _split_role(self._ids[self._header_from :], self._given_role)
        events = self._begin(header)
        return events + self._text(text) + self._end_message(end)

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [TextDelta(text, self.header.channel, self.header.recipient)]

    def _end_message(self, end: int | None) -> list[Event]:
        events = self._text(self._decoder.decode(b"", final=True))
        if end is not None and end != START:
            self._ids.append(end)
        header = self.header
        message = Message(
            header.role,
            "".join(self._pieces),
            header.channel,
            header.recipient,
            header.content_type,
            header.name,
            ids=tuple(self._ids),
            end=end,
            problem=self._problem,
        )
        self.messages.append(message)
        self.state, self.header = BETWEEN, None
        events.append(MessageEnd(message))
        if message.is_tool_call and end is not None:
            events.append(ToolCall(message.recipient, message.content, message))
        return events

    def _complain(self, kind: type[ParseError], reason: str, token_id: int | None = None) -> None:
        """Raise in strict mode; in lenient mode remember the first problem of the message.

        token_id: the one that is out of place, where it has not been taken yet.
        """
        if self._problem is not None:
            return
        ids = self._ids if self._given_role is None else self._ids[self._header_from :]
        ids = ids if token_id is None else [*ids, token_id]
        if self.strict:
            self.state = DONE
            raise kind(reason, ids, decode(ids), self.messages)
        self._problem = kind(reason, ids, decode(ids))


def _split_role(ids: list[int], given_role: str | None) -> tuple[Header, str]:
    """Return (a header of the role alone, the text of `ids` after the role's word).

    Text that does not begin with a role is the assistant's.
    """
    text = decode(ids)
    if given_role is not None:
        return Header(given_role), text
    first = [word.text for word in segments(ids, role_given=False)[0].words if word.kind == "role"]
    if not first or not is_role(first[0].strip()):
        return Header("assistant"), text
    return Header(*split_role(first[0].strip())), text.removeprefix(first[0].rstrip())


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
