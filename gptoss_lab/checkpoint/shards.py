"""Which files make up a checkpoint, and which tensor lies in which: checked both ways before any tensor is read.

An index (`model.safetensors.index.json`) is compared with the headers in both directions: every file and tensor it
names must be there, and everything there must be named. OpenAI's own sharding (`model--00001-of-00007.safetensors`)
has no index, so the numbers must be complete. A single `model.safetensors` needs neither. Whatever else ends in
.safetensors is an error: a stray shard is a sign of two downloads mixed.
"""
from __future__ import annotations

import json
import re
from pathlib import Path

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.header import StoredTensor, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_ORIGINAL_SHARD = re.compile(r"model--(\d{5})-of-(\d{5})\.safetensors")


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> StoredTensor of a checkpoint folder, or of one safetensors file. Reads headers only.

    CheckpointError names the file or tensor that is missing, truncated, doubled, extra or not what the index says.
    """
    if path.is_file():
        return read_header(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder or a .safetensors file is expected")
    index = path / INDEX_NAME
    weight_map = _read_index(index) if index.exists() else None
    names = set(weight_map.values()) if weight_map is not None else _unindexed(path)
    _check_files(path, names)
    tensors = _merge([path / name for name in sorted(names)])
    if weight_map is not None:
        _check_index(path, weight_map, tensors)
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        whole = all(isinstance(x, str) for item in weight_map.items() for x in item)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        whole, weight_map = False, {}
    if not whole or not weight_map:
        raise CheckpointError(f"{file} is no index: a JSON object with a weight_map from tensor to file is expected")
    for tensor, name in weight_map.items():
        if Path(name).name != name:
            raise CheckpointError(f"{file}: {tensor} is said to lie in {name!r}; a file beside the index is expected")
    return weight_map


def _unindexed(folder: Path) -> set[str]:
    """The files of a folder without index: one model.safetensors, or OpenAI's complete numbering."""
    present = {file.name for file in folder.glob("*.safetensors")}
    matches = {name: match for name in present if (match := _ORIGINAL_SHARD.fullmatch(name))}
    if matches:
        counts = {match[2] for match in matches.values()}
        if len(counts) > 1:
            raise CheckpointError(f"{folder} mixes shards of {' and '.join(sorted(counts))} files")
        count = counts.pop()
        return {f"model--{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    if SINGLE_NAME in present:
        return {SINGLE_NAME}
    if present:
        raise CheckpointError(f"{folder} has {min(present)} but no {INDEX_NAME}, which says what must be there")
    raise CheckpointError(f"{folder} holds no .safetensors file")


def _check_files(folder: Path, names: set[str]) -> None:
    for name in sorted(names):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; the checkpoint has {len(names)} files")
    extra = sorted({file.name for file in folder.glob("*.safetensors")} - names)
    if extra:
        kind = "directory" if (folder / extra[0]).is_dir() else "file"
        raise CheckpointError(f"{folder / extra[0]} is a {kind} that does not belong to the {len(names)} files")


def _merge(files: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in two files, {tensors[name].file} and {file.name}; one is expected")
            tensors[name] = stored
    return tensors


def _check_index(folder: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / file} lacks {name}, which the index says it holds")
        if tensors[name].file.name != file:
            raise CheckpointError(f"{name} is in {tensors[name].file}, but the index says {file}")
    unnamed = next((name for name in tensors if name not in weight_map), None)
    if unnamed is not None:
        raise CheckpointError(f"{tensors[unnamed].file} holds {unnamed}, which the index does not name")
