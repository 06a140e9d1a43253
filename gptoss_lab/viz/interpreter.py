"""Triton kernels on the CPU for a notebook: a module's cases, computed by a fresh process with the interpreter.

Triton decides at import whether it compiles or interprets, so a notebook that has imported it cannot change its mind.
`run_module` therefore starts a fresh Python with TRITON_INTERPRET=1; the module prints its results as JSON.
"""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any


class InterpreterFailed(RuntimeError):
    """The process did not end well; the message is the last line it said."""


def obstacle() -> str | None:
    """Why kernels cannot be interpreted here, or None."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def run_module(name: str, timeout: float = 120) -> list[dict[str, Any]]:
    """What `python -m name` prints, read as JSON. timeout: seconds. InterpreterFailed if it ends with an error."""
    done = subprocess.run(
        [sys.executable, "-m", name], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise InterpreterFailed(f"the interpreter's process ended with {done.returncode}: {said[-1]}")
    return json.loads(done.stdout)
