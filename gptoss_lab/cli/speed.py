"""How fast tokens came: time to the first token of every sequence, and tokens per second after that."""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptoss_lab.engine import Event


class Speed:
    """Watches the events of one batch. prompt_tokens: of all prompts together."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.prefill = self.decode = 0.0    # seconds until each sequence had a token; seconds from then to the last one
        self.tokens = self.decoded = 0      # all new tokens; those that came in the decode time
        self._began: set[int] = set()

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same events, timed."""
        start = time.perf_counter()
        for event in events:
            self.tokens += 1
            now = time.perf_counter() - start
            if event.sequence in self._began:
                self.decoded, self.decode = self.decoded + 1, now - self.prefill
            else:
                self._began.add(event.sequence)
                self.prefill, self.decoded = now, 0
            yield event

    @property
    def tokens_per_second(self) -> float:
        """Of the decode part, all sequences together; 0 where there was none."""
        return self.decoded / self.decode if self.decode else 0.0

    def line(self) -> str:
        """One line to print."""
        return (f"{self.prompt_tokens} prompt tokens in {self.prefill:.3f} s; then {self.decoded} tokens in "
                f"{self.decode:.3f} s, {self.tokens_per_second:.1f} tokens/s")
