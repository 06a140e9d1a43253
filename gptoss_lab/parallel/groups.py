"""A group of ranks and the four ways in which they exchange rows; what stands behind it is the group's own business.

`TorchGroup` (torch_group.py) is a process group of torch.distributed: NCCL between GPUs, gloo between CPU processes.
`SimulatedGroup` (simulated.py) is threads of one process. `Group` itself is one rank alone. Everything above is written
against this class, so all three run the same lines.

Every exchange carries a name, `what`: two ranks that meet under different names have lost step, and a rank that does
not come is named together with what the others wait for. `traffic` counts calls and the bytes that this rank must
receive at least: 2 (p - 1) / p N for an all-reduce of N bytes, everything but its own part for the rest.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Watch(Protocol):
    """Told when a rank enters an exchange and leaves it, so that somebody can see who is missing (watch.py)."""

    def __call__(self, what: str) -> AbstractContextManager[None]:
        """The time inside the exchange called `what`."""
        ...


@dataclass
class Traffic:
    """Exchanges so far, by name: how many, and the bytes this rank had to receive."""

    calls: dict[str, int] = field(default_factory=dict)
    received: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, received: float) -> None:
        """One more exchange."""
        self.calls[what] = self.calls.get(what, 0) + 1
        self.received[what] = self.received.get(what, 0) + received

    def clear(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.received.clear()


class Group:
    """`size` ranks, of which this is number `index`. Made without arguments: a rank alone, where nothing moves.

    In every method the first axis of a tensor counts rows, and all ranks call in the same order with the same `what`.
    """

    def __init__(self, index: int = 0, size: int = 1, watch: Watch | None = None) -> None:
        self.index, self.size, self.traffic = index, size, Traffic()
        self._watch = (lambda what: nullcontext()) if watch is None else watch

    def all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of all ranks' x, the same bits on all of them. Equal shapes."""
        if self.size == 1 or not x.numel():
            return x
        self.traffic.add(what, 2 * (self.size - 1) / self.size * x.nbytes)
        with self._watch(what):
            return self._all_reduce(x.contiguous(), what)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int], what: str) -> torch.Tensor:
        """The rows of all ranks one after the other. counts: rows of each rank (x has counts[index])."""
        self._check_rows(x, counts[self.index], what)
        if self.size == 1 or not any(counts):
            return x
        self.traffic.add(what, (sum(counts) - counts[self.index]) * _row_bytes(x))
        with self._watch(what):
            return self._all_gather(x.contiguous(), list(counts), what)

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int], what: str) -> torch.Tensor:
        """x: the rows of all ranks one after the other -> this rank's counts[index] rows, summed over the ranks."""
        self._check_rows(x, sum(counts), what)
        if self.size == 1 or not any(counts):
            return x
        self.traffic.add(what, (self.size - 1) * counts[self.index] * _row_bytes(x))
        with self._watch(what):
            return self._reduce_scatter(x.contiguous(), list(counts), what)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], what: str
    ) -> torch.Tensor:
        """Rows to each rank, rows from each rank. x: those for rank 0, then for rank 1, ...; send, receive: how many.

        Returns the rows from rank 0, then from rank 1, ... A rank may send to itself.
        """
        self._check_rows(x, sum(send), what)
        if self.size == 1:
            return x
        self.traffic.add(what, (sum(receive) - receive[self.index]) * _row_bytes(x))
        with self._watch(what):
            return self._all_to_all(x.contiguous(), list(send), list(receive), what)

    def send(self, x: torch.Tensor, to: int, what: str) -> Callable[[], None]:
        """Start giving x to rank `to`, which calls `receive` for its messages in the same order.

        x must not be changed before the function that is returned has been called: it waits until x has gone.
        """
        x = x.contiguous()
        wait = self._send(x, to, what)

        def finish(_alive: torch.Tensor = x) -> None:
            with self._watch(what):
                wait()

        return finish

    def receive(self, out: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """Fill `out` with what rank `source` sends next, and return it."""
        self.traffic.add(what, out.nbytes)
        with self._watch(what):
            self._receive(out, source, what)
        return out

    # -- what a kind of group does; never called for one rank -------------------------------------------------------
    def _all_reduce(self, x: torch.Tensor, what: str) -> torch.Tensor:
        raise NotImplementedError

    def _all_gather(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        raise NotImplementedError

    def _reduce_scatter(self, x: torch.Tensor, counts: list[int], what: str) -> torch.Tensor:
        raise NotImplementedError

    def _all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int], what: str) -> torch.Tensor:
        raise NotImplementedError

    def _send(self, x: torch.Tensor, to: int, what: str) -> Callable[[], None]:
        raise NotImplementedError

    def _receive(self, out: torch.Tensor, source: int, what: str) -> None:
        raise NotImplementedError

    def _check_rows(self, x: torch.Tensor, rows: int, what: str) -> None:
        if x.shape[0] != rows:
            raise ValueError(f"{what}: {x.shape[0]} rows were given; {rows} are expected")


def _row_bytes(x: torch.Tensor) -> int:
    size = x.element_size()
    for n in x.shape[1:]:
        size *= n
    return size
