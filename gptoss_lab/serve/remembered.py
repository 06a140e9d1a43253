"""What the model wrote, kept so that the next request of a conversation is rendered from its own tokens.

The API is stateless: a client sends back text. But the format wants the reasoning that led to a tool call to be seen
while the call is open, and the engine's cache knows the very tokens. So turns are kept under the ids that were given
out with them (of a call, of a response), the oldest dropped first, as many as fit into a number of tokens.
What is lost: a server that was restarted, or has forgotten, renders such a turn from its text.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gptoss_lab.harmony import Message

CAPACITY = 2_000_000
"""Tokens kept in all: some 70 MB."""


class Remembered:
    """Lists of messages by id. capacity: tokens (or characters, where a message has none) in all."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._held = capacity, 0
        self._kept: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()

    def put(self, key: str, messages: Sequence[Message]) -> None:
        """Keep `messages` under `key`; the oldest are dropped where there is no room, these too if too long."""
        self.drop(key)
        size = sum(map(_size, messages)) + 1
        self._kept[key] = (tuple(messages), size)
        self._held += size
        while self._held > self._capacity:
            self.drop(next(iter(self._kept)))

    def get(self, key: str) -> tuple[Message, ...] | None:
        """What is kept under `key`, or None; it becomes the newest."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def drop(self, key: str) -> bool:
        """Forget `key`; False when nothing was kept."""
        if key not in self._kept:
            return False
        self._held -= self._kept.pop(key)[1]
        return True


def _size(message: Message) -> int:
    return len(message.ids) if message.ids is not None else len(str(message.content)) + 1
