"""Work on pieces in several threads and take the results in order, a bounded number ahead.

torch's own threads split each small operation and wait for one another, which costs more than it gives for pieces
that fit a cache, and very much more when the machine is busy. Here each worker thread has one torch thread and a
piece of its own. torch lets go of Python's lock inside an operation, so threads are enough.
"""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_WORKERS = 8


def default_workers(device: torch.device | str) -> int:
    """One per core up to 8 on the CPU; one elsewhere, where the device does the work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS) if torch.device(device).type == "cpu" else 1


class Workers:
    """A pool of threads as a context: `with Workers(device) as workers: for result in workers.in_order(function,
    items)`.
    """

    def __init__(self, device: torch.device | str, count: int | None = None) -> None:
        self._count = count or default_workers(device)

    def __enter__(self) -> Self:
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._count, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def in_order(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """function(item) for each item, in the items' order, at most one more under way than there are workers."""
        ahead: deque[Future[_Result]] = deque()
        for item in items:
            ahead.append(self._pool.submit(function, item))
            if len(ahead) >= self._count + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
