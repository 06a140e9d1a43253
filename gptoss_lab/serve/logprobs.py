"""A token as the log-probabilities of both APIs name it."""
from __future__ import annotations

from typing import Any

from gptoss_lab.harmony.formats import ChatFormat


def named(chat: ChatFormat, token_id: int, logprob: float) -> dict[str, Any]:
    """token: its text, U+FFFD where it is a part of a character; bytes: list of int; logprob: natural log."""
    raw = chat.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}
