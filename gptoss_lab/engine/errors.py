"""What can go wrong in the engine, as types: each message is one line that names the sequence and the value."""
from __future__ import annotations


class EngineError(RuntimeError):
    """Base of every error that the engine raises on purpose."""


class PromptError(EngineError, ValueError):
    """A prompt that cannot be run: empty, too long, or holding what is no token id of the model."""


class SamplingError(EngineError, ValueError):
    """A sampling value outside its range."""


class LogitsError(EngineError, ArithmeticError):
    """Logits from which nothing can be drawn: NaN, +inf, or every token ruled out. sequence: whose, or None."""

    def __init__(self, message: str, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sequence = sequence
