"""Harmony as a chat format: `render` and the lenient `StreamParser` behind the protocol."""
from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.harmony.ids import engine_stop_ids
from gptoss_lab.harmony.messages import Message
from gptoss_lab.harmony.parse import StreamParser
from gptoss_lab.harmony.render import render
from gptoss_lab.harmony.vocabulary import token_bytes


class Harmony:
    """See `protocol.ChatFormat`."""

    name = "harmony"

    def render(self, messages: Sequence[Message], *, history: str = "format") -> list[int]:
        """Messages, then <|start|>assistant."""
        return render(messages, history=history)

    def reader(self) -> StreamParser:
        """A lenient parser of what follows <|start|>assistant."""
        return StreamParser("assistant", strict=False)

    def stop_ids(self, *, stop_at_call: bool = True) -> frozenset[int]:
        """<|return|>, <|endoftext|> and, unless it is switched off, <|call|>."""
        return engine_stop_ids(stop_at_call=stop_at_call)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of o200k_harmony."""
        return token_bytes(token_id)
