"""Which backend runs an operation: chosen once, with the reason, and never changed in silence.

An operation (say "sink_attention") has several backends that compute the same thing: a plain reference, a Triton
kernel, a vendor library. Each backend registers itself with a function that says why it cannot run here, or None if
it can. `choose` returns the function together with the reason for the choice, so that a notebook or a log can print
why a machine does what it does. An explicit choice that cannot be honoured raises `BackendUnavailable`; only "auto"
may take another backend, and then the reason names what was passed over.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot run here, or cannot honour an argument; the message says what is missing."""


@dataclass(frozen=True)
class Choice:
    """What `choose` decided: the operation, the backend's name, why it was taken, and the function to call."""

    operation: str
    backend: str
    reason: str
    function: Callable[..., Any] = field(repr=False)


@dataclass(frozen=True)
class _Backend:
    name: str
    rank: int
    obstacle: Callable[..., str | None]
    function: Callable[..., Any]


_OPERATIONS: dict[str, dict[str, _Backend]] = {}


def register(
    operation: str, backend: str, *, rank: int, obstacle: Callable[..., str | None] = lambda **needs: None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a function the `backend` of `operation`.

    rank: among backends that can run, "auto" takes the lowest. obstacle(**needs): the needs given to `choose` (device,
    dtype, shapes, ...) as keywords; returns one line that says what stands in the way, or None.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        known = _OPERATIONS.setdefault(operation, {})
        if backend in known and known[backend].function.__qualname__ != function.__qualname__:
            raise ValueError(f"{operation} already has a backend called {backend!r}")
        known[backend] = _Backend(backend, rank, obstacle, function)
        return function

    return add


def backends(operation: str, **needs: Any) -> Mapping[str, str | None]:
    """Every backend of an operation, best first, with what stands in its way for these needs (None: it can run)."""
    return {b.name: b.obstacle(**needs) for b in sorted(_known(operation).values(), key=lambda b: b.rank)}


def why_not(operation: str, backend: str, **needs: Any) -> str | None:
    """What stands in the way of one backend, or None. BackendUnavailable if the operation has no such backend."""
    return _backend(operation, backend).obstacle(**needs)


def choose(operation: str, backend: str = "auto", **needs: Any) -> Choice:
    """Pick the backend of an operation for these needs (device, dtype, shapes: whatever its obstacles ask about).

    "auto" takes the best that can run and says what was passed over; a named backend that cannot run raises
    BackendUnavailable with what is missing.
    """
    if backend != "auto":
        chosen = _backend(operation, backend)
        obstacle = chosen.obstacle(**needs)
        if obstacle is not None:
            raise BackendUnavailable(f"{operation}: backend {backend!r} cannot run here: {obstacle}")
        return Choice(operation, backend, "asked for", chosen.function)
    passed: list[str] = []
    for candidate in sorted(_known(operation).values(), key=lambda b: b.rank):
        obstacle = candidate.obstacle(**needs)
        if obstacle is None:
            reason = "; ".join([*passed, f"{candidate.name} can run here"])
            return Choice(operation, candidate.name, reason, candidate.function)
        passed.append(f"not {candidate.name}: {obstacle}")
    raise BackendUnavailable(f"{operation}: no backend can run here: {'; '.join(passed)}")


def _known(operation: str) -> dict[str, _Backend]:
    if operation not in _OPERATIONS:
        raise BackendUnavailable(f"no operation is called {operation!r}; there are {', '.join(sorted(_OPERATIONS))}")
    return _OPERATIONS[operation]


def _backend(operation: str, backend: str) -> _Backend:
    known = _known(operation)
    if backend not in known:
        raise BackendUnavailable(f"{operation} has no backend {backend!r}; there are {', '.join(known)}")
    return known[backend]
