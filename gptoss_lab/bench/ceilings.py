"""What this GPU reaches at best: a device copy and large matrix products, the ceilings every other number is held to.

A bound from the datasheet says what is impossible; these say what a plain library call gets, at rested and at sustained
clocks. Random inputs: products of zeros run faster than real ones.

    python -m gptoss_lab.bench.ceilings --out results/ceilings.jsonl
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench.timing import clocks_under, interleaved
from gptoss_lab.results import make_row, write_rows

SIZE = 8192
COPY_BYTES = 4 << 30
DATASHEET = {"gb_per_s": 4800.0, "bf16": 989.0, "fp8": 1979.0}


def bench(repetitions: int = 20, sustained_seconds: float = 2.0) -> list[dict[str, Any]]:
    """Rows of suite "profile": GB/s of a copy (read and written), TFLOP/s of bf16 and fp8 products of size 8192."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    scale_a, scale_b = torch.ones(SIZE, 1, device="cuda"), torch.ones(1, SIZE, device="cuda")
    runs: dict[str, Callable[[], object]] = {
        "device copy": lambda: target.copy_(source),
        "bf16 product": lambda: a @ b,
        "fp8 product, rowwise scales": lambda: torch._scaled_mm(a8, b8, scale_a, scale_b, out_dtype=torch.bfloat16),
    }
    flop = 2 * SIZE**3
    rows = []
    for name, times in interleaved(runs, repetitions).items():
        copying = name == "device copy"
        amount = 2 * COPY_BYTES / 1e9 if copying else flop / 1e12
        metric, unit = ("gb_per_s", "GB/s") if copying else ("tflops", "TFLOP/s")
        bound = DATASHEET["gb_per_s"] if copying else DATASHEET[name.split()[0]]
        readings, size = [amount / t for t in times], COPY_BYTES if copying else SIZE
        sustained = clocks_under(runs[name], sustained_seconds)
        rows.append(make_row("profile", f"ceiling: {name}", "torch", metric, readings, unit, bound=bound,
                             clocks=sustained, size=size))
    return rows


def main() -> None:
    """Run, print one line per row and write the rows where --out says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA GPU here; the ceilings are a GPU's")
    rows = bench()
    for row in rows:
        share = row["value"] / row["bound"]
        reached = f"{row['value']:8.0f} {row['unit']}, {share:.0%} of the datasheet"
        print(f"{row['case']:<40} {reached}; clocks under load {row['clocks']}")
    if given.out is not None:
        write_rows(given.out, rows)


if __name__ == "__main__":
    main()
