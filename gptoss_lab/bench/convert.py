"""Time a conversion to FP8 against a plain copy of the bytes it writes, and its memory above start.

The copy reads nothing: it writes files of the same sizes from one buffer and waits for the disk just as the
conversion does, interleaved with it in one run, so the ratio says what reading, converting and checksums add to
writing. Real shapes in a few layers, made by `synth`; memory must not depend on how many. Two cases: whole checkpoint
(half of a short one is embeddings, which are copied) and experts alone (a small vocabulary).

    python -m gptoss_lab.bench.convert --folder /big/disk --layers 4 --out results/convert.jsonl
"""
from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.manifest import layer_of, manifest, total_bytes
from gptoss_lab.checkpoint.synth import synth
from gptoss_lab.checkpoint.workers import default_workers
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.results import make_row, write_rows

_PIECE = 16 << 20
_BUFFER = os.urandom(_PIECE)


class PeakMemory:
    """Resident bytes of this process above those at entry, sampled every few milliseconds: `with PeakMemory() as
    peak: ...; peak.bytes`.
    """

    def __init__(self, interval: float = 0.004) -> None:
        self._process, self._interval, self._stop = psutil.Process(), interval, threading.Event()
        self.bytes = 0

    def __enter__(self) -> Self:
        self._start = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._start)
            self._stop.wait(self._interval)


def plain_copy(sizes: dict[str, int], folder: Path) -> None:
    """Write files of these sizes (bytes by name) into a new folder and wait until they are on the disk."""
    buffer = memoryview(_BUFFER)
    folder.mkdir()
    for name, size in sizes.items():
        with open(folder / name, "wb", buffering=0) as stream:
            stream.writelines(buffer[: min(left, _PIECE)] for left in range(size, 0, -_PIECE))
            os.fsync(stream.fileno())


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, processor seconds of all threads) of `action()`."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def bench(
    config: ModelConfig, folder: Path, layers: int = 4, repetitions: int = 3, device: torch.device | str = "cpu",
    scales: str = "pow2", case: str = "mxfp4 to fp8",
) -> list[dict[str, Any]]:
    """Rows of suite "convert": seconds (peer: the plain copy), gb_per_s written, and peak bytes above start.

    config: real shapes. folder: where there is room for twice the checkpoint; left as it was. The peak's `bound` is
    three layers of output. The first conversion, after which the source is in the page cache, is not counted.
    """
    config = config.with_layers(layers)
    output = manifest(config, "fp8")
    layer_bytes = total_bytes(spec for spec in output if layer_of(spec.name) == 0)
    wall: dict[str, list[float]] = {"convert": [], "copy": []}
    cpu: dict[str, list[float]] = {"convert": [], "copy": []}
    peaks = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source, target, copy = (Path(temporary) / name for name in ("source", "target", "copy"))
        synth(config, source, device=device)
        for repetition in range(repetitions + 1):
            with PeakMemory() as peak:
                converted = _timed(lambda: convert(source, target, scales=scales, device=device))
            peaks.append(peak.bytes)
            sizes = {file.name: file.stat().st_size for file in target.iterdir()}
            shutil.rmtree(target)
            copied = _timed(lambda sizes=sizes: plain_copy(sizes, copy))
            shutil.rmtree(copy)
            for name, (seconds, cpu_seconds) in (("convert", converted), ("copy", copied)) if repetition else ():
                wall[name].append(seconds)
                cpu[name].append(cpu_seconds)
    conditions = {
        "model": config.name, "layers": layers, "scales": scales, "device": str(device),
        "workers": default_workers(device),
        "bytes_written": sum(sizes.values()), "layer_bytes": layer_bytes, "cpu_seconds": _median(cpu["convert"]),
        "copy_cpu_seconds": _median(cpu["copy"]), "copy_raw": wall["copy"],
    }
    backend = f"torch {torch.device(device).type}"
    copy_median, size = _median(wall["copy"]), conditions["bytes_written"]
    return [
        make_row("convert", case, backend, "seconds", wall["convert"], "s",
                 peer=("plain copy", copy_median), **conditions),
        make_row("convert", case, backend, "gb_per_s", [size / seconds / 1e9 for seconds in wall["convert"]], "GB/s",
                 peer=("plain copy", size / copy_median / 1e9), **conditions),
        make_row("convert", f"{case}, peak memory above start", backend, "bytes", peaks, "bytes", statistic="max",
                 bound=float(3 * layer_bytes), **conditions),
    ]


def main() -> None:
    """Run both cases and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scales", default="pow2")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="a .jsonl file to add the rows to")
    options = parser.parse_args()
    whole = preset(options.model)
    experts = replace(whole, name=f"{whole.name} without embeddings", vocab_size=128)
    rows = []
    for config, case in ((experts, "mxfp4 to fp8, layers alone"), (whole, "mxfp4 to fp8, whole")):
        rows += bench(config, options.folder, options.layers, options.repetitions, options.device, options.scales, case)
    for row in rows:
        against = f", plain copy {row['peer']['value']:.3g}" if row["peer"] else f", bound {row['bound']:.3g}"
        print(f"{row['case']}: {row['value']:.4g} {row['unit']} {row['metric']}{against}; layers {options.layers}")
    if options.out is not None:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
