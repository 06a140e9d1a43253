"""The unfinished output of a conversion: beside the target, resumable, and never taken for a checkpoint.

`<target>.partial/` holds `plan.json` (source, options), `checkpoint/` (the files so far) and `done/` (one JSON per
finished file, with the checksum of each tensor). A killed run leaves it behind; the same conversion again reads the
finished files back, keeps those whose bytes have their checksums and makes the rest. The target appears in one
rename, when all of it is on the disk. No reader opens a folder whose name, or whose parent's, ends in `.partial`.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.header import read_header
from gptoss_lab.checkpoint.reader import PARTIAL_SUFFIX
from gptoss_lab.checkpoint.synth import check_target, publish
from gptoss_lab.checkpoint.writer import guarded, write_json

try:
    import fcntl
except ImportError:         # Windows: two runs at once are then not told apart
    fcntl = None

_READ_BYTES = 16 << 20


class Workspace:
    """Use as a context; `publish` at the end. target: the folder to come. plan: JSON that two runs must share to
    share files.
    """

    def __init__(self, target: Path, plan: dict[str, Any], size: int) -> None:
        self.target = target
        self.root = target.with_name(target.name + PARTIAL_SUFFIX)
        self.folder = self.root / "checkpoint"
        check_target(target, max(0, size - _size_of(self.root)))
        self._plan, self._lock = plan, -1

    def __enter__(self) -> Self:
        file = self.root / "plan.json"
        for path in (self.folder, self.root / "done"):
            guarded(path, lambda path=path: path.mkdir(parents=True, exist_ok=True))
        self._take_lock()
        try:
            if not file.exists():
                write_json(file, self._plan)
            elif self._kept(file) != json.loads(json.dumps(self._plan)):
                raise CheckpointError(f"{self.root} is left from another conversion (source, options); remove it first")
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _kept(self, file: Path) -> object:
        """The plan of the conversion that was begun here."""
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            raise CheckpointError(f"{file} is damaged; remove {self.root} first") from None

    def finished(self, name: str) -> dict[str, Any] | None:
        """The record of file `name` if it is finished and its bytes have the recorded checksums, else None."""
        record, file = self._record(name), self.folder / name
        if not record.exists() or not file.exists():
            return None
        try:
            content = json.loads(record.read_text(encoding="utf-8"))
            sums = {row["destination"]: row["sha256"] for row in content["rows"]}
            return content if checksums(file) == sums else None
        except (CheckpointError, ValueError, KeyError, TypeError):
            return None

    def finish(self, name: str, content: dict[str, Any]) -> None:
        """Record that file `name` is finished. content: JSON with `rows`, each with `destination` and `sha256`."""
        write_json(self._record(name), content)

    def publish(self) -> None:
        """Give the finished folder its name and remove what else there is."""
        publish(self.folder, self.target)
        self.discard()

    def discard(self) -> None:
        """Remove everything unfinished."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _record(self, name: str) -> Path:
        return self.root / "done" / f"{name}.json"

    def _take_lock(self) -> None:
        self._lock = guarded(self.root, lambda: os.open(self.root / "lock", os.O_CREAT | os.O_RDWR))
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(f"{self.root} is in use: another run is converting to {self.target}") from None


def checksums(file: Path) -> dict[str, str]:
    """Tensor -> sha256 (hex) of its bytes, for every tensor of a safetensors file."""
    sums = {}
    with open(file, "rb", buffering=0) as stream:
        for name, stored in read_header(file).items():
            digest, left = hashlib.sha256(), stored.stop - stored.start
            stream.seek(stored.start)
            while left and (data := stream.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
            sums[name] = digest.hexdigest()
    return sums


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if folder.exists() else 0
