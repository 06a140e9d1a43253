"""Decoders: ways of finding the next tokens of a batch. The engine calls any of them through one small interface.

    plain.py            the model once, one token for each sequence
    speculative.py      a draft model proposes tokens, the model checks them in one pass
    mtp.py              heads on the model's last hidden state propose them (gpt-oss ships no such heads)
    verify.py           which proposals stand, so that the tokens are the model's own
    acceptance.py       how many did
    cached.py           what they share: caches, chunks, one forward pass
    drawing.py          from logits to tokens

A decoder that drafts may find several tokens in one step; the engine does not need to know.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gptoss_lab.engine.request import NewToken, Request


class Decoder(Protocol):
    """What the engine asks of a decoder. One that can run out of memory is a `Memory` too (engine/memory.py)."""

    def start(self, request: Request) -> None:
        """A sequence joins: make its caches and keep them in `request.state`. Nothing is computed yet."""

    def step(self, batch: Sequence[Request]) -> list[list[NewToken]]:
        """Move the batch on by one step.

        Returns the new tokens of every request, in the order of `batch`: none while its prompt is still being read, one
        or more after. What `request.tokens` holds and no cache does yet is this step's work; the engine appends the new
        tokens itself, and may drop those that follow a stop id. LogitsError where nothing can be drawn.
        """
