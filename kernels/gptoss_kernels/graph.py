"""Capturing launches in a CUDA graph while Python's garbage collector keeps still.

A captured model and its graphs know each other, so only the collector ends them, at a moment of its own choosing. If
that moment lies within the capture of another graph, the driver refuses to destroy the old one ("operation not
permitted when stream is capturing") and the capture is lost. So the collector runs before a capture and not during it.
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **where: object) -> Iterator[None]:
    """What is launched within goes into `graph`. where: pool and stream, as of `torch.cuda.graph`."""
    running = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **where):
            yield
    finally:
        if running:
            gc.enable()
