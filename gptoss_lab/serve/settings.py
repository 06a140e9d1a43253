"""What a server is told: its name, its limits, its key. Checked when made, so a wrong value never starts a server."""
from __future__ import annotations

import datetime
from dataclasses import dataclass, field


class SettingsError(ValueError):
    """A setting outside its range."""


@dataclass(frozen=True)
class Settings:
    """One server.

    model: the name under which the model is offered. chat_format: by name, see `harmony.formats`. api_key: None takes
    every request. max_context: tokens of prompt and answer together. max_running: answers written at once (the rows of
    the engine's batch). max_queue: requests that may wait beyond those. default_tokens: new tokens where a request
    names no number. max_body: bytes of a request. Times in seconds: request_timeout for a whole answer, send_timeout
    for a client that does not take what it is sent, body_timeout for a request to arrive. restarts: how often in a row
    the engine is started again before its death is final. date: YYYY-MM-DD told to the model; None is today's.
    """

    model: str
    chat_format: str = "harmony"
    api_key: str | None = field(default=None, repr=False)
    max_context: int = 131072
    max_running: int = 64
    max_queue: int = 64
    default_tokens: int = 4096
    max_body: int = 4 * 2**20
    request_timeout: float = 600.0
    send_timeout: float = 30.0
    body_timeout: float = 30.0
    restarts: int = 3
    date: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_context", "max_running", "default_tokens", "max_body"):
            _need(name, getattr(self, name), 1)
        for name in ("max_queue", "restarts"):
            _need(name, getattr(self, name), 0)
        for name in ("request_timeout", "send_timeout", "body_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SettingsError(f"{name} is {getattr(self, name)}; a number of seconds above 0 is expected")
        if not self.model:
            raise SettingsError("model is ''; the model needs a name")
        if self.api_key == "":
            raise SettingsError("api_key is ''; give a key, or None to take every request")
        if self.date is not None:
            _check_date(self.date)

    def today(self) -> str:
        """The date that the model is told."""
        return self.date or datetime.date.today().isoformat()


def _need(name: str, value: int, least: int) -> None:
    if value < least:
        raise SettingsError(f"{name} is {value}; at least {least} is expected")


def _check_date(text: str) -> None:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"date is {text!r}; write it as YYYY-MM-DD") from None
