"""Who is inside which exchange, in memory that the ranks share with the process that started them.

A hanging rank does not say so, and the others only know that they wait. So every rank notes when it enters an exchange
and when it leaves; whoever reads the notes sees that some ranks have waited for long in "combine" and one has not come.
"""
from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

_NAME = 64


class Notes:
    """One slot per rank: since when it is inside an exchange (0: it is not), how many it entered, its name."""

    def __init__(self, context: BaseContext, world: int) -> None:
        self.world = world
        self.since: Any = context.RawArray(ctypes.c_double, world)
        self.count: Any = context.RawArray(ctypes.c_long, world)
        self.name: Any = context.RawArray(ctypes.c_char, _NAME * world)

    def watch(self, rank: int) -> Any:
        """What `Group` calls around an exchange."""

        @contextmanager
        def inside(what: str) -> Iterator[None]:
            text = what.encode()[: _NAME - 1]
            self.name[_NAME * rank : _NAME * (rank + 1)] = text.ljust(_NAME, b"\0")
            self.count[rank] += 1
            self.since[rank] = time.monotonic()
            yield
            self.since[rank] = 0.0

        return inside

    def where(self, rank: int) -> str:
        """Where a rank is, in words."""
        name = bytes(self.name[_NAME * rank : _NAME * (rank + 1)]).rstrip(b"\0").decode(errors="replace")
        if self.since[rank]:
            return f"waits in {name!r}, its exchange number {self.count[rank]}"
        if not name:
            return "has had no exchange yet"
        return f"is not in an exchange; its last of {self.count[rank]} was {name!r}"

    def waited(self, rank: int) -> float:
        """Seconds that a rank has been inside its exchange; 0 outside one."""
        since = self.since[rank]
        return time.monotonic() - since if since else 0.0
