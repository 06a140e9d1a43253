"""Ids as coloured tokens: what each of them is, for a display.

What: `spans` cuts any list of ids into pieces of text, each with the part it plays. How: the lenient parser's state
before an id says what the id is; the words of a header are labelled when it is whole. Nothing is drawn.
What is lost: nothing; the ids of all spans, joined, are the input, and so is their text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gptoss_lab.harmony.header import segments
from gptoss_lab.harmony.ids import FIRST_SPECIAL, MESSAGE, START, TERMINATORS, check_id
from gptoss_lab.harmony.messages import Message
from gptoss_lab.harmony.parse import BETWEEN, BODY, Event, MessageEnd, StreamParser
from gptoss_lab.harmony.vocabulary import decode, token_bytes

KINDS = ("marker", "role", "channel", "recipient", "content_type", "text", "stray")
"""What a span can be. marker: a special token in its place; stray: a special token where the format has none for it."""


@dataclass(frozen=True)
class Span:
    """One token, or the few that share a character.

    text: what it shows; special tokens spelled out. kind: one of `KINDS`. ids: tuple of int, one or more.
    role, channel, recipient: of the message it belongs to; None outside of messages.
    """

    text: str
    kind: str
    ids: tuple[int, ...]
    role: str | None = None
    channel: str | None = None
    recipient: str | None = None


def spans(ids: Iterable[int], role: str | None = "assistant") -> list[Span]:
    """Return `ids` as spans, in order.

    ids: any of the vocabulary, well formed or not. role: as in `parse`, "assistant" for what a model wrote after a
    prompt, None for a whole conversation. Raises `TokenIdError`.
    """
    parser = StreamParser(role, strict=False)
    messages: list[Message] = []  # those that have tokens
    labelled = []  # (number of the message, region, id)
    for token_id in map(check_id, ids):
        region = _region(parser.state, token_id)
        messages += _with_tokens(parser.feed(token_id))
        labelled.append((len(messages) - (region == "end"), region, token_id))
    messages += _with_tokens(parser.finish())
    shown = []
    for (number, spare), group in groupby(labelled, key=lambda label: (label[0], label[1] == "spare")):
        regions = [label[1:] for label in group]
        shown += _spare(regions) if spare else _message(regions, messages[number])
    return shown


def _with_tokens(events: Iterable[Event]) -> list[Message]:
    """Return the messages that `events` end; not those of words that are a part of another one's header."""
    return [event.message for event in events if isinstance(event, MessageEnd) and event.message.ids is not None]


def _region(state: str, token_id: int) -> str:
    """Return which part of a message `token_id` is, taken in `state`; "spare" between messages."""
    if token_id == START:
        return "start"
    if token_id in TERMINATORS:
        return "spare" if state == BETWEEN else "end"
    if state == BODY:
        return "body"
    return "message" if token_id == MESSAGE else "header"


def _spare(regions: Sequence[tuple[str, int]]) -> list[Span]:
    return [Span(decode([token_id]), "stray", (token_id,)) for _, token_id in regions]


def _message(regions: Sequence[tuple[str, int]], message: Message) -> list[Span]:
    """Return the spans of one message, given as (region, id)."""
    role_given = regions[0][0] != "start"
    has_body = any(region == "message" for region, _ in regions)
    pieces: list[tuple[str, str, tuple[int, ...]]] = []  # (text, kind, ids)
    for region, group in groupby(regions, key=lambda label: label[0]):
        ids = [token_id for _, token_id in group]
        if region == "header" and has_body:
            pieces += _header(ids, role_given)
        elif region == "header":
            pieces += _header_as_text(ids, message)
        elif region == "body":
            pieces += _body(ids)
        else:
            pieces += [(decode([token_id]), "marker", (token_id,)) for token_id in ids]
    return [Span(*piece, message.role, message.channel, message.recipient) for piece in pieces]


def _header(ids: Sequence[int], role_given: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (text, kind, ids) of a header, each token with the kind of the word it begins in."""
    for part in segments(ids, role_given=role_given):
        if part.marker is not None:
            yield decode([part.marker]), "stray" if part.misplaced else "marker", (part.marker,)
        kinds = [word.kind if word.kind != "unread" else "text" for word in part.words for _ in word.text]
        begin = 0
        for text, token_ids in glyphs(part.ids):
            yield text, kinds[begin] if kinds else "marker", token_ids
            begin += len(text)


def _header_as_text(ids: Sequence[int], message: Message) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (text, kind, ids) of a header without <|message|>: the role, then the message's text."""
    remaining = len(decode(ids))
    for text, kind, token_ids in _body(ids):
        yield text, kind if remaining <= len(message.content) else "role", token_ids
        remaining -= len(text)


def _body(ids: Sequence[int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for special, group in groupby(ids, key=lambda token_id: token_id >= FIRST_SPECIAL):
        if special:
            yield from ((decode([token_id]), "stray", (token_id,)) for token_id in group)
        else:
            yield from ((text, "text", token_ids) for text, token_ids in glyphs(list(group)))


def glyphs(ids: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return ordinary `ids` as (text, ids); tokens that show nothing before the next one go with it.

    The texts, joined, are `decode(ids)`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found: list[tuple[str, tuple[int, ...]]] = []
    waiting: tuple[int, ...] = ()
    for token_id in ids:
        waiting += (token_id,)
        text = decoder.decode(token_bytes(token_id))
        if text:
            found.append((text, waiting))
            waiting = ()
    rest = decoder.decode(b"", final=True)
    if waiting:
        found.append((rest, waiting))
    elif rest:
        found[-1] = (found[-1][0] + rest, found[-1][1])
    return found
