"""Triton kernels on the CPU for a notebook: a module's cases, computed by a fresh process with the interpreter.

Triton decides at import whether it compiles or interprets, so a notebook that has imported it cannot change its mind.
`run_module` therefore starts a fresh Python with TRITON_INTERPRET=1; the module prints its results as JSON.
"""
from __future__ import annotations

import functools
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


def patch_once() -> None:
    """In a process that interprets: Triton puts its own functions in place once, not at every launch and every call
    of a device function, and looks a dtype up by its name: half of its time went there. The functions stay in place."""
    from triton.runtime import interpreter

    put_in_place = getattr(interpreter, "_patch_lang", None)
    if put_in_place is None or not hasattr(interpreter, "_LangPatchScope"):
        return                                           # another Triton: it works as it does, only more slowly

    @functools.cache
    def once(function: Any) -> Any:
        scope = put_in_place(function)
        scope._changes.clear()                           # so that nothing is taken back when the launch ends
        return scope

    known, numpy_dtype = {}, interpreter._get_np_dtype

    def by_name(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = numpy_dtype(kind)
        return known[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = once, by_name


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
