"""What a chat format has to offer: two small interfaces.

Conversations are lists of `Message` (system, developer, user, assistant, tool), answers are the events of `parse.py`.
The conventions that every format keeps, so that whoever stands in front of it need not know which one it is:
  - reasoning is on the channel "analysis"; a call of the function f is a message to "functions.f", whatever the format
    calls it in its own text; the body of a call is the text of its arguments;
  - a reader is lenient: it never raises for ids that the model has, and keeps every character that the model wrote;
  - a message that was read carries its own ids, and rendering it again gives them back.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gptoss_lab.harmony.messages import Message
from gptoss_lab.harmony.parse import Event


class Reader(Protocol):
    """Reads one answer, id by id. messages: those that have ended so far."""

    messages: list[Message]

    def feed(self, token_id: int) -> list[Event]:
        """Take one id and return what it completed. `TokenIdError` for an id that the model does not have."""

    def finish(self) -> list[Event]:
        """Say that the answer has ended, and return what that completed."""


class ChatFormat(Protocol):
    """A way of writing conversations as token ids."""

    name: str

    def render(self, messages: Sequence[Message], *, history: str = "format") -> list[int]:
        """Return the ids of a conversation and of the beginning of the assistant's answer.

        history: which earlier reasoning is kept, see `history.prune`. Text of messages never becomes structure.
        `RenderError` for a message that cannot be written down.
        """

    def reader(self) -> Reader:
        """Return a reader for what a model writes after `render`."""

    def stop_ids(self, *, stop_at_call: bool = True) -> frozenset[int]:
        """Return the ids at which an engine stops; `stop_at_call=False` lets the model write on after a tool call."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, markers spelled out."""
