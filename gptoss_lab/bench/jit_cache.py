"""What compiling attention at run time costs once, and what is left of it in the next process.

FlashInfer's kernels are compiled the first time they are asked for. Here two processes, one after the other, share a
cache folder that is empty at first: the first one compiles, says so on stderr, and answers; the second one finds the
library there and answers. Each is timed from the end of its imports to its first result on the GPU, the CUDA context
included, and both results are checked against fp32.

    python -m gptoss_lab.bench.jit_cache PATH.jsonl --backends xqa flashinfer-fa3
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptoss_lab import results
from gptoss_lab.bench.attention import HEADS, TOLERANCE, Case, Inputs, prepare, sampled_error

CASES = {"xqa": Case("decode", 1, 8192), "flashinfer-fa2": Case("prefill", 1024, 1024, 128),
         "flashinfer-fa3": Case("prefill", 1024, 1024)}
LIMIT_SECONDS = 5.0             # what the first call of a second process may take
PROCESSES = ("first process: compiles", "second process: from the cache")


def first_call(backend: str) -> dict[str, float]:
    """Make a plan, run it once, wait: seconds, and the relative error of the result. Everything is imported before."""
    import flashinfer  # noqa: F401
    import torch

    begin = time.perf_counter()
    case = CASES[backend]
    given = Inputs(case)
    given.out.fill_(torch.nan)
    run, _ = prepare(case, given, backend)
    run(given.sinks)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "error": sampled_error(case, given, given.out, given.sinks)}


def process(backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process that makes the first call, with its cache in `folder`."""
    return subprocess.run([sys.executable, "-m", "gptoss_lab.bench.jit_cache", "--call", backend], text=True,
                          capture_output=True, env=os.environ | {"FLASHINFER_WORKSPACE_BASE": str(folder)})


def two_processes(backend: str, folder: Path) -> list[tuple[dict[str, float], str]]:
    """What each of the two found, and what it told the user. folder: of the cache. RuntimeError if one fails."""
    found = []
    for _ in PROCESSES:
        ran = process(backend, folder)
        if ran.returncode:
            raise RuntimeError(f"{backend}: {(ran.stderr.strip().splitlines() or ['no output'])[-1]}")
        told = [line for line in ran.stderr.splitlines() if line.startswith("gptoss_kernels:")]
        found.append((json.loads(ran.stdout.splitlines()[-1]), "\n".join(told)))
    return found


def run(path: str | Path | None, backends: Sequence[str] = tuple(CASES)) -> list[dict[str, Any]]:
    """Two rows for each backend, printed, and written to `path` (.jsonl). RuntimeError for a wrong result."""
    rows = []
    for backend in backends:
        case = CASES[backend]
        with tempfile.TemporaryDirectory() as folder:
            both = two_processes(backend, Path(folder))
        for number, (name, (found, told)) in enumerate(zip(PROCESSES, both, strict=True)):
            if not found["error"] < TOLERANCE:
                raise RuntimeError(f"{backend}, {name}: relative error {found['error']:.1e}; {TOLERANCE} is allowed")
            rows.append(results.make_row(
                "attention", f"first call, {name}", backend, "seconds", [found["seconds"]], "s", statistic="single",
                batch=case.batch, tokens=case.kv_len, window=case.window, heads=HEADS,
                told=told.replace(folder, "CACHE"), limit_seconds=LIMIT_SECONDS if number else None))
            print(f"{backend:16} {name:34} {found['seconds']:8.2f} s  {told.replace(folder, 'CACHE')}", flush=True)
    if path is not None:
        results.write_rows(path, rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: python -m gptoss_lab.bench.jit_cache [PATH.jsonl] [--backends ...]."""
    parser = argparse.ArgumentParser(prog="gptoss_lab.bench.jit_cache", description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", help="where to write the rows (.jsonl)")
    parser.add_argument("--backends", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--call", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.call:
        print(json.dumps(first_call(given.call)))
    else:
        run(given.path, given.backends)


if __name__ == "__main__":
    main()
