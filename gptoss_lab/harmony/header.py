"""Reading a header: which word is the role, the channel, the recipient, the content type.

What: the ids between <|start|> and <|message|> to fields. How: the ids are cut at special tokens first and only then
turned into words, so a marker that is merely spelled out in a name is a part of the name.

    [ROLE | ROLE:NAME | TOOL] [to=RECIPIENT] [<|channel|> CHANNEL [to=RECIPIENT]] [<|constrain|> FORMAT | FORMAT]

The models write the recipient in either place, and with or without a space before <|constrain|>.
Why not the reference parser: it takes a lone word without `to=` for the recipient and a second <|channel|> for text,
and gives up the whole message for one word too many.
What is lost: nothing; a word that has no meaning where it stands is labelled as unread, with the whitespace around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gptoss_lab.harmony.ids import CHANNEL, CONSTRAIN, FIRST_SPECIAL, ROLES
from gptoss_lab.harmony.vocabulary import decode

_WORD = re.compile(r"\s*\S+(?:\s+$)?")


@dataclass(frozen=True)
class Header:
    """The fields of a header. unread: what could not be read, "" in a good one; problem: the same in words, or None."""

    role: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    unread: str = ""
    problem: str | None = None

    @property
    def fields(self) -> tuple[str | None, ...]:
        """Return (role, name, channel, recipient, content_type), for comparison."""
        return self.role, self.name, self.channel, self.recipient, self.content_type


@dataclass(frozen=True)
class Word:
    """A word of a header. kind: role, channel, recipient, content_type or unread. text: with the whitespace before it.

    bare: whether it is a content type only by its place, at the end of the header and without <|constrain|>.
    """

    kind: str
    text: str
    bare: bool = False


@dataclass(frozen=True)
class Segment:
    """A special token, or None at the beginning of a header, and the ordinary ids after it as words."""

    marker: int | None
    ids: tuple[int, ...]
    words: tuple[Word, ...]

    @property
    def misplaced(self) -> bool:
        """Whether the marker has no place in a header, or names nothing."""
        if self.marker in (CHANNEL, CONSTRAIN):
            return not self.words or self.words[0].kind == "unread"
        return self.marker is not None


def read_header(ids: Sequence[int], given_role: str | None = None) -> Header:
    """Return the fields of the header `ids` (without <|start|> and <|message|>). Never raises.

    given_role: the role, where it stands in the prompt and not in `ids`; None where the first word is the role.
    """
    parts = segments(ids, role_given=given_role is not None)
    fields = {word.kind: value(part.marker, word) for part in parts for word in part.words}
    unread = ""
    for part in parts:
        unread += decode([part.marker]) if part.misplaced else ""
        unread += "".join(word.text for word in part.words if word.kind == "unread")
    role, name = split_role(fields["role"]) if "role" in fields else (given_role or "assistant", None)
    problem = f"{unread!r} has no meaning in a header" if unread else None
    if problem is None and given_role is None and "role" not in fields:
        problem = "the header has no role"
    return Header(
        role, name, fields.get("channel"), fields.get("recipient"), fields.get("content_type"), unread, problem
    )


def segments(ids: Sequence[int], *, role_given: bool) -> list[Segment]:
    """Return the header `ids` cut at its special tokens, every word with its kind.

    Of two words for one field the second is unread, unless they agree.
    """
    parts, seen = [], {}
    for marker, part in _cut(ids):
        words = []
        for index, match in enumerate(_WORD.finditer(decode(part))):
            word = _first_guess(marker, index, match.group(), role_given)
            if not word.bare and seen.setdefault(word.kind, value(marker, word)) != value(marker, word):
                word = replace(word, kind="unread")
            words.append(word)
        parts.append(Segment(marker, tuple(part), tuple(words)))
    return _settle_role(_settle_bare(parts, "content_type" in seen), "recipient" in seen)


def value(marker: int | None, word: Word) -> str:
    """Return what `word` after `marker` says: the name without `to=`, the format with its <|constrain|>."""
    text = word.text.strip()
    if word.kind == "recipient":
        return text.removeprefix("to=")
    return "<|constrain|>" + text if word.kind == "content_type" and marker == CONSTRAIN and not word.bare else text


def split_role(word: str) -> tuple[str, str | None]:
    """Return (role, name) of a header's first word; a word that is no role is a tool's name."""
    role, _, name = word.partition(":")
    return (role, name or None) if is_role(word) else ("tool", word)


def is_role(word: str) -> bool:
    """Whether `word` is a role, or a role with a name, as in "user:ann"."""
    role, colon, name = word.partition(":")
    return role in ROLES and bool(colon) == bool(name)


def _cut(ids: Sequence[int]) -> Iterator[tuple[int | None, list[int]]]:
    """Yield (special id or None for what stands before the first, the ordinary ids after it)."""
    marker, part = None, []
    for token_id in ids:
        if token_id >= FIRST_SPECIAL:
            yield marker, part
            marker, part = token_id, []
        else:
            part.append(token_id)
    yield marker, part


def _first_guess(marker: int | None, index: int, text: str, role_given: bool) -> Word:
    """Return word number `index` after `marker` with the kind that it has if the rest of the header allows it."""
    word = text.strip()
    if index == 0 and marker is None and not role_given:
        return Word("role", text)
    if index == 0 and marker == CHANNEL:
        return Word("channel", text)
    if word.startswith("to="):
        return Word("recipient" if word != "to=" else "unread", text)
    if index == 0 and marker == CONSTRAIN:
        return Word("content_type", text)
    return Word("content_type", text, bare=True)


def _settle_bare(parts: list[Segment], has_format: bool) -> list[Segment]:
    """Keep a bare word as content type only if it is the only one, the last of the header, and stands apart."""
    bare = [word for part in parts for word in part.words if word.bare]
    last = parts[-1].words[-1:]
    if len(bare) == 1 and last == (bare[0],) and bare[0].text[0].isspace() and not has_format:
        return parts
    return [
        replace(part, words=tuple(replace(w, kind="unread") if w.bare else w for w in part.words)) for part in parts
    ]


def _settle_role(parts: list[Segment], addressed: bool) -> list[Segment]:
    """Keep the first word as role only if it is one, or a tool's name: any word, when the message has a recipient."""
    first = parts[0].words[:1]
    if not first or first[0].kind != "role" or addressed or is_role(first[0].text.strip()):
        return parts
    words = (replace(first[0], kind="unread"), *parts[0].words[1:])
    return [replace(parts[0], words=words), *parts[1:]]
