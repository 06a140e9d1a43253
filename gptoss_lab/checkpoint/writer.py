"""Write one safetensors file in pieces, whole or not at all.

The safetensors library writes a file from tensors that are all in memory; a layer of the 120B model would be
gigabytes. The form is simple enough to stream: shapes are known beforehand, so the header is written first and each
tensor's bytes go to their place as they are made. One thread writes and another takes the sha256 of each tensor,
behind the caller's back but at most a few pieces behind, which bounds memory. The file carries the suffix `.part`
until every byte of every tensor is there and on the disk.
"""
from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import torch

from gptoss_lab.checkpoint.dtypes import ITEM_BYTES, TORCH_DTYPES
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import TensorSpec

_PENDING_BYTES = 64 << 20
_T = TypeVar("_T")


class ShardWriter:
    """Use as a context: `write` pieces of every tensor, then `close`; leaving without `close` drops the file.

    file: the final path; its folder exists. specs: the tensors of the file. checksums: whether `close` returns any.
    Errors are CheckpointError, among them a full disk.
    """

    def __init__(self, file: Path, specs: Iterable[TensorSpec], checksums: bool = True) -> None:
        self.file = file
        self._part = file.with_name(file.name + ".part")
        # Wide elements first, so that every tensor starts at a multiple of its element size.
        ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
        self._specs = {spec.name: spec for spec in ordered}
        if len(self._specs) < len(ordered):
            twice = next(spec.name for spec in ordered if self._specs[spec.name] is not spec or ordered.count(spec) > 1)
            raise CheckpointError(f"{file.name}: {twice} is planned twice")
        header = _header(ordered)
        self._start, offset = {}, len(header)
        for spec in ordered:
            self._start[spec.name] = offset
            offset += spec.nbytes
        self._done = dict.fromkeys(self._specs, 0)
        self._sums = {name: hashlib.sha256() for name in self._specs} if checksums else {}
        self._pending: deque[tuple[int, list[Future[None]]]] = deque()
        self._writing, self._hashing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._stream = self._guard(lambda: io.FileIO(self._part, "w"))
        self._guard(lambda: _write_all(self._stream, 0, memoryview(header)))

    def write(self, name: str, data: torch.Tensor) -> None:
        """Append the elements of `data`, of the tensor's dtype and on any device, to tensor `name`.

        The data must not change afterwards. CheckpointError: a name that was not planned, another dtype, more than
        fits.
        """
        if name not in self._specs:
            raise CheckpointError(f"{self.file.name}: {name} was written but is not planned")
        spec = self._specs[name]
        if data.dtype != TORCH_DTYPES[spec.dtype]:
            raise CheckpointError(f"{self.file.name}: {name} is {spec.dtype}, but {data.dtype} was written")
        if self._done[name] + data.nbytes > spec.nbytes:
            raise CheckpointError(f"{self.file.name}: {name} has {spec.nbytes} bytes, but more was written")
        if not data.nbytes:
            return
        view = memoryview(data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        at = self._start[name] + self._done[name]
        self._done[name] += data.nbytes
        work = [self._writing.submit(_write_all, self._stream, at, view)]
        if self._sums:
            work.append(self._hashing.submit(self._sums[name].update, view))
        self._pending.append((data.nbytes, work))
        while sum(size for size, _ in self._pending) > _PENDING_BYTES:
            self._wait_for_oldest()

    def close(self) -> dict[str, str]:
        """Finish the file and give it its name. Returns tensor -> sha256 (hex). CheckpointError if a tensor is not
        whole.
        """
        short = next((name for name, spec in self._specs.items() if self._done[name] < spec.nbytes), None)
        if short is not None:
            size = self._specs[short].nbytes
            raise CheckpointError(f"{self.file.name}: {self._done[short]} of the {size} bytes of {short} were written")
        while self._pending:
            self._wait_for_oldest()
        self._guard(lambda: os.fsync(self._stream.fileno()))
        self._stop()
        self._guard(lambda: os.replace(self._part, self.file))
        return {name: digest.hexdigest() for name, digest in self._sums.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._part.unlink(missing_ok=True)

    def _stop(self) -> None:
        for pool in (self._writing, self._hashing):
            pool.shutdown(wait=True, cancel_futures=True)
        self._stream.close()

    def _wait_for_oldest(self) -> None:
        _, work = self._pending.popleft()
        for future in work:
            self._guard(future.result)

    def _guard(self, action: Callable[[], _T]) -> _T:
        return guarded(self.file, action)


def guarded(file: Path, action: Callable[[], _T]) -> _T:
    """Run `action()`; an OSError on the way becomes a CheckpointError of one line that names `file`."""
    try:
        return action()
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise CheckpointError(f"no space left while writing {file}; free some and run again") from None
        raise CheckpointError(f"{file} cannot be written: {error.strerror or error}") from None


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable (where the system lets a folder be opened)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(file: Path, content: object) -> None:
    """Write one JSON file and its bytes to the disk, under its name only when whole."""
    part = file.with_name(file.name + ".part")

    def action() -> None:
        with open(part, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)

    guarded(file, action)


def _header(specs: list[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(stream: io.FileIO, at: int, view: memoryview) -> None:
    stream.seek(at)
    while len(view):
        view = view[stream.write(view) :]
