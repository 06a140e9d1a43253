"""An error as the user of a command sees it: one line on stderr and an exit code, never a traceback.

Exit codes: 0 done, 1 the work failed, 2 the command line is wrong, 130 interrupted. GPTOSS_LAB_TRACEBACK=1 in the
environment lets everything through, to see where an error came from.
"""
from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Self

import typer
from typer.exceptions import TyperException

from gptoss_lab.cli.output import note


class OneLine:
    """`with OneLine() as outcome: ...` reports what goes wrong inside; `outcome.code` is the exit code."""

    code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, SystemExit) or os.environ.get("GPTOSS_LAB_TRACEBACK"):
            return False
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has gone; what is still buffered must not raise again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.code = 1
            return True
        message, self.code = explain(error)
        note(f"gptoss-lab: {message}")
        return True


def explain(error: BaseException) -> tuple[str, int]:
    """What to say about an error, and the exit code. The library's own errors already say it."""
    if isinstance(error, TyperException):
        return error.format_message(), error.exit_code
    if isinstance(error, (typer.Abort, KeyboardInterrupt)):
        return "interrupted", 130
    if isinstance(error, MemoryError):
        return "not enough memory", 1
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}", 1
    if isinstance(error, (ValueError, RuntimeError, OSError)) and str(error):
        return str(error), 1
    return f"internal error, {type(error).__name__}: {error} (GPTOSS_LAB_TRACEBACK=1 shows where)", 1
