"""Decode steps captured at chosen batch sizes and replayed for whatever requests are at hand.

A step of decode is some 390 launches for 36 layers; issued one by one from Python they take longer than they run. A
CUDA graph replays them in one call, from fixed addresses and for one number of rows, so a step of n tokens takes the
captured size that is next to n, and its spare rows are padding (decode.py). Sizes are captured when first needed, or
all at once by `capture`; each says how long that took and what memory it holds.

Where there is no GPU the same buffers and the same function are used, only run instead of replayed: the logic of what a
replay may see and what it must not is the same, and is tested so.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gptoss_kernels.graph import capturing
from gptoss_lab.model.fast.decode import DecodeStep
from gptoss_lab.model.paged import PagedCache

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A decode step of one size. replay() computes `outputs`, logits [batch, V] and the rows [batch, H] that they were
    read from, from the buffers of `decode`. seconds, bytes: what capturing it took and what device memory it added."""

    decode: DecodeStep
    replay: Callable[[], None]
    outputs: Outputs
    seconds: float
    bytes: int


class DecodeGraphs:
    """All captured sizes of a model.

    make: a DecodeStep of a number of rows. run: from a DecodeStep to its outputs, launching only. sizes: rows to
    capture; a larger batch takes the next power of two.
    """

    def __init__(
        self, make: Callable[[int], DecodeStep], run: Callable[[DecodeStep], Outputs], device: torch.device,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes are {list(sizes)}; at least one batch size, each at least 1, is needed")
        self._make, self._run, self._device = make, run, device
        self.sizes = tuple(sorted(set(sizes)))
        self.captured: dict[int, Captured] = {}
        on_gpu = device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None       # shared: one size runs at a time
        self._side = torch.cuda.Stream(device) if on_gpu else None

    def size_for(self, requests: int) -> int:
        """The smallest captured size that holds so many requests."""
        fitting = [size for size in self.sizes if size >= requests]
        return fitting[0] if fitting else 1 << (requests - 1).bit_length()

    def capture(self, size: int) -> Captured:
        """The captured step of a size, made now if it is not there."""
        if size not in self.captured:
            begin, before = time.perf_counter(), _held(self._device)
            decode = self._make(size)
            replay, outputs = _captured(lambda: self._run(decode), self._side, self._memory)
            self.captured[size] = Captured(decode, replay, outputs, time.perf_counter() - begin,
                                           max(0, _held(self._device) - before))
        return self.captured[size]

    def __call__(
        self, ids: torch.Tensor, caches: Sequence[PagedCache], lengths: Sequence[int] | None = None, least: int = 0
    ) -> Outputs:
        """ids [n] int64, lengths[b] of them of each sequence (default: one) -> logits [n, V] in the model's dtype and
        the rows [n, H] they were read from, in buffers that the next call overwrites. least: rows that the step must
        have room for, since other ranks run the same size."""
        count = ids.shape[0]
        step = self.capture(self.size_for(max(count, least)))
        step.decode.fill(ids, caches, lengths)
        step.replay()
        logits, rows = step.outputs
        return logits[:count], rows[:count]


def _held(device: torch.device) -> int:
    """Bytes the process holds on the device, graphs' private memory included and unused ones not; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _captured(
    run: Callable[[], Outputs], side: torch.cuda.Stream | None, memory: object
) -> tuple[Callable[[], None], Outputs]:
    """(replay, outputs): the launches of `run` in a graph; on the CPU, `run` itself into fixed outputs.

    It runs twice before it is captured, so that everything that compiles, loads or tunes itself has done so.
    """
    if side is None:
        fixed = tuple(output.clone() for output in run())

        def run_again() -> None:
            for output, now in zip(fixed, run(), strict=True):
                output.copy_(now)

        return run_again, fixed
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool=memory, stream=side):
        outputs = run()

    def replay(_alive: Callable[[], Outputs] = run) -> None:
        graph.replay()

    return replay, outputs
