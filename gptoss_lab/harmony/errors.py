"""Every error that this package raises: one line each, and what the model wrote is never lost with it.

What: one base class, one class for each kind of failure. How: a parse error carries the ids and the text of the message
that failed and the messages that were complete before it; together they are the whole input.
Why this way: a server has to choose between repairing, asking again and giving up, and needs the text for all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptoss_lab.harmony.messages import Message


class HarmonyError(ValueError):
    """Base of every error of this package."""


class VocabularyError(HarmonyError):
    """The vocabulary file cannot be had, or is not the expected one. Names the file and the setting."""


class TokenIdError(HarmonyError):
    """A token id that the model does not have. Raised in both parsing modes: the model cannot have written it."""


class RenderError(HarmonyError):
    """A message that cannot be written down in the format without becoming another one."""


class ParseError(HarmonyError):
    """The ids do not follow the format.

    ids: tuple of int, the tokens of the message that failed, from its first (what stands in the prompt is not among
        them) to where the parser stopped; `parse` appends the rest of its input.
    raw_text: str, the text of `ids`, special tokens spelled out.
    messages: tuple of Message, the messages that were complete before; empty in a `Message.problem`.
    """

    def __init__(self, reason: str, ids: Sequence[int], raw_text: str, messages: Sequence[Message] = ()):
        shown = raw_text if len(raw_text) <= 200 else raw_text[:200] + "..."
        super().__init__(f"{reason} in {shown!r}")
        self.reason = reason
        self.ids = tuple(ids)
        self.raw_text = raw_text
        self.messages = tuple(messages)


class UnexpectedTokenError(ParseError):
    """A token where the format has no place for it: text between messages, a marker inside a body."""


class MissingHeaderError(ParseError):
    """A message that ended before its <|message|>."""


class TruncatedHeaderError(ParseError):
    """The input ended inside a header."""


class BadHeaderError(ParseError):
    """A header that was closed by <|message|> but cannot be read."""
