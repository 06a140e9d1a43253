"""The plain decoder: one pass of the model over all new tokens of the batch, one drawn token for each sequence.

What is lost: the model's weights are read once for every token of a sequence, and the batch of every step has a new
shape, so nothing is captured in graphs.
"""
from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.engine.decoders.cached import CachedDecoder, Model
from gptoss_lab.engine.memory import Caches
from gptoss_lab.engine.request import NewToken, Request
from gptoss_lab.model.paged import PagePool


class PlainDecoder(CachedDecoder):
    """One token for each sequence a step.

    model: called as `Model` says. step_tokens: at most so many new tokens go through the model at once, 1 or more.
    pool: pages for the caches; None takes the model's own, and else caches that grow by themselves.
    """

    def __init__(self, model: Model, step_tokens: int = 8192, pool: PagePool | None = None) -> None:
        super().__init__([Caches(model, pool)], step_tokens)

    def step(self, batch: Sequence[Request]) -> list[list[NewToken]]:
        """One pass of the model; see `Decoder.step`."""
        found = self.read(batch, self.shares(batch))
        return [[found[request]] if request in found else [] for request in batch]
