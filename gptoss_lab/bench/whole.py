"""One model of real shapes from nothing to logits: write it, convert it, load it, run it; time and memory of each.

The weights are random (`synth`), which changes neither bytes nor arithmetic. The forward here is the plain one, FP8
experts decoded one at a time: the yardstick that the fast kernels are measured against, not a claim to speed. Both
checkpoints are removed at the end.

    python -m gptoss_lab.bench.whole --model gpt-oss-20b --device cuda --folder /big/disk --out results/whole.jsonl
"""
from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench.convert import PeakMemory
from gptoss_lab.checkpoint import synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.model import Transformer, load_model
from gptoss_lab.results import make_row, write_rows

Row = dict[str, Any]


def bench(config: ModelConfig, folder: Path, device: str, tokens: tuple[int, ...]) -> list[Row]:
    """Rows of suites "load", "convert" and "prefill" for one model.

    folder: room for both checkpoints (36.5 GB for gpt-oss-20b). device: where numbers are made, converted and run.
    tokens: prompt lengths of the forward; a length that does not fit gives a row that says so.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        released, fp8 = Path(temporary) / "released", Path(temporary) / "fp8"
        rows = _measured("load", "synth: write the released form", config, device,
                         lambda: {"bytes_written": _size(synth(config, released, device=device))})
        rows += _measured("convert", "MXFP4 to FP8", config, device, lambda: _converted(released, fp8, device))
        shutil.rmtree(released)
        models: list[Transformer] = []
        rows += _measured("load", "load the FP8 checkpoint", config, device,
                          lambda: models.append(load_model(fp8, device, torch.bfloat16)) or {})
        for count in tokens:
            rows += _forward(models[0], count, device)
    return rows


def _converted(source: Path, target: Path, device: str) -> dict[str, Any]:
    """Convert, and return the totals of the manifest."""
    return dict(convert(source, target, device=device).totals)


def _measured(
    suite: str, case: str, config: ModelConfig, device: str, action: Callable[[], dict[str, Any]]
) -> list[Row]:
    """Seconds, peak host bytes above start and peak device bytes of one action; what it returns becomes conditions."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as peak:
        begin = time.perf_counter()
        facts = action()
        seconds = time.perf_counter() - begin
    backend = f"torch {device}"
    rows = [
        make_row(suite, case, backend, "seconds", [seconds], "s", statistic="single", model=config.name, **facts),
        make_row(suite, f"{case}, peak host memory above start", backend, "bytes", [peak.bytes], "bytes",
                 statistic="single", model=config.name),
    ]
    if device == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
        rows.append(make_row(suite, f"{case}, peak device memory", backend, "bytes", [peak_bytes], "bytes",
                             statistic="single", model=config.name))
    return rows


def _forward(model: Transformer, count: int, device: str) -> list[Row]:
    """The plain forward of one random prompt, first call apart from two more; NaN or a constant row is an error."""
    name, case = model.config.name, "plain forward, FP8 experts decoded as used"
    conditions = {"batch": 1, "tokens": count}
    ids = torch.randint(0, model.config.vocab_size, (count,), device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    try:
        for _ in range(3):
            begin = time.perf_counter()
            with torch.inference_mode():
                logits = model(ids)
            checked = bool(torch.isfinite(logits).all()) and float(logits.std()) > 0
            times.append(time.perf_counter() - begin)
            if not checked:
                raise RuntimeError(f"{name}, {count} tokens: the logits are not finite and different from each other")
    except torch.cuda.OutOfMemoryError as error:
        return [make_row("prefill", case, f"reference {device}", "seconds", [], "s", model=name,
                         failed=f"out of memory: {str(error).splitlines()[0]}", **conditions)]
    rows = [make_row("prefill", case, f"reference {device}", "seconds", times[1:], "s", model=name,
                     first_call_seconds=times[0], **conditions)]
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        rows.append(make_row("prefill", f"{case}, peak device memory", f"reference {device}", "bytes", [peak], "bytes",
                             statistic="single", model=name, **conditions))
    return rows


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    """Run, print one line per row and write the rows where --out says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    config = preset(given.model)
    if given.layers is not None:
        config = config.with_layers(given.layers)
    rows = bench(config, given.folder, given.device, tuple(given.tokens))
    for row in rows:
        value = "failed" if row["value"] is None else f"{row['value']:,.3f} {row['unit']}"
        print(f"{row['suite']:<8} {row['case']:<64} {value:>24}  {row['conditions']}")
    if given.out is not None:
        write_rows(given.out, rows)


if __name__ == "__main__":
    main()
