"""A ChatML-like format: the role on a line of its own, thinking and tool calls between pairs of markers.

    <im_start>system
    INSTRUCTIONS, then one JSON line for each tool<im_end>
    <im_start>user
    TEXT<im_end>
    <im_start>assistant
    <think>REASONING</think>TEXT<tool_call>{"name": "f", "arguments": {...}}</tool_call><im_end>
    <im_start>tool
    RESULT<im_end>

The markers are six ids that the vocabulary of gpt-oss reserves and never uses, so no text can spell them. Consecutive
messages of the assistant are one turn. A call is known when it is whole: its name is inside its text.
Why it is here: it shares nothing with Harmony but the interface, so it proves that the interface is one. gpt-oss was
not trained on it; a model that was not will not answer in it.
What is lost: channels other than analysis and final, the name of a tool in its result, the model's identity.
"""
from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from itertools import groupby

from gptoss_lab.harmony.errors import BadHeaderError, ParseError, UnexpectedTokenError
from gptoss_lab.harmony.history import prune
from gptoss_lab.harmony.ids import END_OF_TEXT, FIRST_SPECIAL, check_id
from gptoss_lab.harmony.messages import Developer, Message, System
from gptoss_lab.harmony.parse import Event, MessageEnd, MessageStart, TextDelta, ToolCall
from gptoss_lab.harmony.vocabulary import encode, token_bytes

IM_START, IM_END, THINK, THINK_END, TOOL_CALL, TOOL_CALL_END = range(200013, 200019)
SPELLED = {IM_START: "<im_start>", IM_END: "<im_end>", THINK: "<think>", THINK_END: "</think>",
           TOOL_CALL: "<tool_call>", TOOL_CALL_END: "</tool_call>"}
_PREFIX = "functions."
_CLOSES = {"think": THINK_END, "call": TOOL_CALL_END}


class ChatML:
    """See `protocol.ChatFormat`."""

    name = "chatml"

    def render(self, messages: Sequence[Message], *, history: str = "format") -> list[int]:
        """Turns, then <im_start>assistant and a line break."""
        ids: list[int] = []
        for role, turn in groupby(prune(messages, history), key=_turn_role):
            own = list(turn)
            if role == "assistant":
                ids += _turn(role, [i for message in own for i in _assistant(message)])
            else:
                for message in own:
                    ids += _turn(role, encode(_text(message)))
        return [*ids, IM_START, *encode("assistant\n")]

    def reader(self) -> ChatMLReader:
        """A reader of what follows the header of the assistant's turn."""
        return ChatMLReader()

    def stop_ids(self, *, stop_at_call: bool = True) -> frozenset[int]:
        """<im_end>, <|endoftext|> and, unless it is switched off, </tool_call>."""
        return frozenset({IM_END, END_OF_TEXT} | ({TOOL_CALL_END} if stop_at_call else set()))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; the markers of this format as it spells them."""
        return SPELLED[token_id].encode() if token_id in SPELLED else token_bytes(token_id)


class ChatMLReader:
    """Reads one answer. It is in plain text, in thinking, in a call, in a header ("assistant" and a line break).

    messages: list of the messages that have ended so far.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._begin("text", "assistant")

    def feed(self, token_id: int) -> list[Event]:
        """Take one id; see `protocol.Reader`."""
        token_id = check_id(token_id)
        if self._region in _CLOSES and token_id == _CLOSES[self._region]:
            return self._close(token_id)
        if token_id in (IM_START, IM_END, END_OF_TEXT):
            events = self._close(None)
            self._begin("header" if token_id == IM_START else "text", "assistant")
            return events
        if token_id in (THINK, TOOL_CALL):
            events = self._close(None)
            self._begin("think" if token_id == THINK else "call", self._role, token_id)
            return events
        if token_id >= FIRST_SPECIAL:
            self._complain(f"{_spell(token_id)} inside a message")
        return self._append(token_id)

    def finish(self) -> list[Event]:
        """The answer has ended; see `protocol.Reader`."""
        return self._close(None)

    def _begin(self, region: str, role: str, *opening: int) -> None:
        self._region, self._role = region, role
        self._ids: list[int] = list(opening)
        self._pieces: list[str] = []
        self._started = False
        self._problem: ParseError | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _append(self, token_id: int) -> list[Event]:
        self._ids.append(token_id)
        text = self._decoder.decode(_spell(token_id).encode() if token_id in SPELLED else token_bytes(token_id))
        return self._read_role(text) if self._region == "header" else self._say(text)

    def _read_role(self, text: str) -> list[Event]:
        """Collect a header; its line break begins the text."""
        self._pieces.append(text)
        role, line_break, rest = "".join(self._pieces).partition("\n")
        if not line_break:
            return []
        if role != "assistant":
            self._complain(f"a turn of {role!r}")
            self._pieces, rest = [], "".join(self._pieces)
        self._region, self._pieces = "text", []
        self._ids = [] if role == "assistant" else self._ids
        return self._say(rest)

    def _say(self, text: str) -> list[Event]:
        """Text of this region; that of a call is kept until it is whole."""
        if not text:
            return []
        self._pieces.append(text)
        if self._region == "call":
            return []
        return [*self._start(), TextDelta(text, self._channel, None)]

    @property
    def _channel(self) -> str:
        return "analysis" if self._region == "think" else "final"

    def _start(self, recipient: str | None = None) -> list[Event]:
        if self._started:
            return []
        self._started = True
        channel, kind = (self._channel, None) if recipient is None else ("commentary", "json")
        return [MessageStart("assistant", None, channel, recipient, kind)]

    def _close(self, end: int | None) -> list[Event]:
        """End the region; what follows is plain text of the same turn. end: the marker that closed it, or None."""
        rest = self._decoder.decode(b"", final=True)
        if self._region == "header":
            self._pieces.append(rest)
        events = self._say(rest) if self._region != "header" else []
        call = self._read_call(end)
        ids, region = (self._ids if end is None else [*self._ids, end]), self._region
        if call is not None:
            events += self._end_call(*call, ids)
        elif region in ("call", "header"):
            self._complain("a header without its line break" if region == "header" else "a call that is no call")
            opening = _spell(TOOL_CALL) if region == "call" else ""
            shown = opening + "".join(self._pieces) + ("" if end is None else _spell(end))
            self._pieces, self._region = [], "text"
            events += self._end(self._say(shown), ids)
        elif self._started or region == "think":
            if region == "think" and end is None:
                self._complain("thinking that was not closed")
            events += self._end(self._start(), ids)
        self._begin("text", self._role)
        return events

    def _read_call(self, end: int | None) -> tuple[str, str] | None:
        """(name, text of the arguments) of a whole and well-formed call."""
        if self._region != "call" or end is None or self._problem is not None:
            return None
        try:
            call = json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or set(call) - {"name", "arguments"}:
            return None
        arguments = call.get("arguments", {})
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def _end_call(self, name: str, arguments: str, ids: Sequence[int]) -> list[Event]:
        message = Message("assistant", arguments, "commentary", _PREFIX + name, "json", ids=tuple(ids), end=ids[-1])
        self.messages.append(message)
        return [*self._start(message.recipient), TextDelta(arguments, "commentary", message.recipient),
                MessageEnd(message), ToolCall(message.recipient, arguments, message)]

    def _end(self, events: list[Event], ids: Sequence[int]) -> list[Event]:
        if not events and not self._started:
            return []
        message = Message("assistant", "".join(self._pieces), self._channel, ids=tuple(ids),
                          end=ids[-1] if ids and ids[-1] in _CLOSES.values() else None, problem=self._problem)
        self.messages.append(message)
        return [*events, MessageEnd(message)]

    def _complain(self, reason: str) -> None:
        if self._problem is None:
            kind = BadHeaderError if self._region in ("header", "call") else UnexpectedTokenError
            self._problem = kind(reason, self._ids, "".join(map(_spell, self._ids)))


def _spell(token_id: int) -> str:
    return SPELLED[token_id] if token_id in SPELLED else token_bytes(token_id).decode("utf-8", "replace")


def _turn(role: str, body: Sequence[int]) -> list[int]:
    return [IM_START, *encode(role + "\n"), *body, IM_END, *encode("\n")]


def _turn_role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _assistant(message: Message) -> list[int]:
    """One message of the assistant inside its turn: its own ids, or written anew."""
    if message.ids is not None and message.problem is None:
        return list(message.ids)
    if message.is_tool_call:
        call = {"name": message.recipient.removeprefix(_PREFIX), "arguments": _arguments(message.content)}
        return [TOOL_CALL, *encode(json.dumps(call, ensure_ascii=False)), TOOL_CALL_END]
    if message.channel == "analysis":
        return [THINK, *encode(message.content), THINK_END]
    return encode(message.content)


def _arguments(text: str) -> object:
    """The arguments as JSON; text that is none stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(message: Message) -> str:
    """The body of a turn that is not the assistant's."""
    content = message.content
    if isinstance(content, System):
        return "\n".join(line for line in (
            content.identity, f"Date: {content.date}" if content.date is not None else None,
            f"Reasoning: {content.reasoning}" if content.reasoning is not None else None,
        ) if line)
    if isinstance(content, Developer):
        tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                 for tool in content.tools]
        lines = [content.instructions or "", *(json.dumps(tool, ensure_ascii=False) for tool in tools)]
        return "\n".join(line for line in lines if line)
    return content
