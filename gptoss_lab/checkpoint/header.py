"""The header of one safetensors file, read and checked without touching a tensor.

Form of the file: 8 bytes, the little-endian length of the header; the header, JSON from tensor name to dtype, shape and
byte range; then the bytes. The safetensors library checks most of this when it opens a file, but in words that name
neither file nor tensor, so the check is done here: the ranges must tile the rest of the file exactly, which is what
finds a file cut or grown by a single byte.
"""
from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_lab.checkpoint.dtypes import ITEM_BYTES
from gptoss_lab.checkpoint.errors import CheckpointError

_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: file, dtype (safetensors name), shape, and bytes start..stop-1 counted from the file's
    start.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> StoredTensor for every tensor of a safetensors file. CheckpointError names the file and what is wrong."""
    if file.is_dir():
        raise CheckpointError(f"{file} is a directory; a safetensors file is expected")
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise CheckpointError(f"{file} is no whole safetensors file: {size} bytes cannot hold its header")
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    entries = _parse(file, raw)
    tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in entries.items()}
    _check_tiling(file, tensors, 8 + length, size)
    return tensors


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
        if twice is not None:
            raise CheckpointError(f"{file} names {twice} twice in its header")
        return dict(pairs)

    try:
        entries = json.loads(raw, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{file} is no safetensors file: its header is not JSON") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} is no safetensors file: its header is not a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(x, int) and x >= 0 for x in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file}: the header entry of {name} lacks dtype, shape or data_offsets")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!r}")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != needed:
        raise CheckpointError(f"{file}: {name} has {stop - start} bytes; {dtype} {list(shape)} needs {needed}")
    return StoredTensor(file, dtype, shape, data_start + start, data_start + stop)


def _check_tiling(file: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise CheckpointError(f"{file}: {name} starts at byte {tensor.start} and {kind}; byte {end} is expected")
        end = tensor.stop
    if size != end:
        kind = "truncated" if size < end else "too long"
        raise CheckpointError(f"{file} is {kind}: {size} bytes where its header says {end}")
