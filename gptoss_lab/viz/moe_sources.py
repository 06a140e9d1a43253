"""Excerpts of the packaged CUDA source: a function by its name, a comment by its place; never a copy in a notebook."""
from __future__ import annotations

import re
from importlib import resources

PACKAGE = "gptoss_kernels.moe.cuda"


def source(name: str) -> str:
    """The text of a packaged CUDA file, for example "grouped_gemm.cu". ValueError if there is no such file."""
    file = resources.files(PACKAGE) / name
    if not name.endswith((".cu", ".cuh")) or not file.is_file():
        there = sorted(f.name for f in resources.files(PACKAGE).iterdir() if f.name.endswith((".cu", ".cuh")))
        raise ValueError(f"no CUDA source is called {name!r}; there is {', '.join(there)}")
    return file.read_text(encoding="utf-8")


def function(name: str, file: str = "grouped_gemm.cu") -> str:
    """One function of a CUDA file with the comment and the template line above it, to its closing brace.

    ValueError unless exactly one function of that name is defined there.
    """
    lines = source(file).splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(rf"[A-Za-z].*\b{re.escape(name)}\(", line)
              and not line.rstrip().endswith(";")]
    if len(starts) != 1:
        raise ValueError(f"{file} defines {len(starts)} functions called {name!r}; exactly one is needed")
    first = starts[0]
    while first and re.match(r"//|template\b", lines[first - 1]):
        first -= 1
    last = starts[0]
    if not lines[last].rstrip().endswith("}"):
        last = next(n for n in range(starts[0], len(lines)) if lines[n].startswith("}"))
    return "\n".join(lines[first:last + 1])


def header(file: str = "grouped_gemm.cu") -> str:
    """The comment a CUDA file opens with."""
    kept = []
    for line in source(file).splitlines():
        if not line.startswith("//"):
            break
        kept.append(line)
    return "\n".join(kept)
