"""Base of the decoders that draft: propose, check in one pass of the model, keep what stands, take back the rest.

A sequence in decode lacks one token in the model's cache. A round proposes up to k more, feeds all k + 1 and gets k + 1
rows of logits: what the model says after each. Those that stand, and one token of the model's own, are the step's find
(verify.py); the cache is cut to them. So a round costs one pass of the model over a few tokens, which reads the weights
once, and finds 1 to k + 1 tokens.

Prompts are read as by the plain decoder, in a pass of their own: it needs one row of logits per sequence at most, and
a round's batch has the same few tokens for each. Near its end a sequence proposes fewer, so that no position beyond its
last one is ever filled; where a step's tokens are few, those first in the batch draft.
"""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.decoders.cached import CachedDecoder
from gptoss_lab.engine.decoders.verify import Proposal, verify
from gptoss_lab.engine.memory import Caches
from gptoss_lab.engine.request import NewToken, Request


class DraftingDecoder(CachedDecoder):
    """sources: the target's caches first. draft_tokens: proposals of a round at most, 1 or more. ValueError.

    acceptance: counts of what stood, over all requests.
    """

    def __init__(self, sources: Sequence[Caches], draft_tokens: int, step_tokens: int) -> None:
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens is {draft_tokens}; at least 1 is expected")
        super().__init__(sources, step_tokens)
        self.draft_tokens, self.acceptance = draft_tokens, Acceptance()

    def step(self, batch: Sequence[Request]) -> list[list[NewToken]]:
        """One pass for those that read, one round for those that draft; see `Decoder.step`."""
        share = self.shares(batch)
        drafting = [request for request in batch if share[request] > self.pending(request)]
        reading = [request for request in batch if share[request] <= self.pending(request)]
        found = {request: [new] for request, new in self.read(reading, share).items()}
        self.follow(reading)
        if drafting:
            found |= self._round(drafting, [share[request] - 1 for request in drafting])
        return [found.get(request, []) for request in batch]

    def wanted(self, request: Request) -> int:
        """Its token and the proposals, where it can draft; none for a place beyond its last."""
        return self.pending(request) + (min(self.draft_tokens, request.left - 1) if self.may_draft(request) else 0)

    def may_draft(self, request: Request) -> bool:
        """Whether one token is to be fed, and there is something to propose from."""
        return self.pending(request) == 1

    def follow(self, requests: Sequence[Request]) -> None:
        """The target has read; do with the other models what keeps them in step. Nothing by default."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """counts[n] tokens, 1 or more, that may follow request n."""
        raise NotImplementedError

    def settle(self, request: Request, accepted: int) -> None:
        """`accepted` of the proposals stood; bring what else the decoder keeps in line. Nothing by default."""

    def _round(self, requests: list[Request], counts: list[int]) -> dict[Request, list[NewToken]]:
        proposals = self.propose(requests, counts)
        fed = [[request.tokens[-1], *p.tokens] for request, p in zip(requests, proposals, strict=True)]
        logits: Tensor = self.forward(requests, fed, "all")                  # [sum(counts + 1), vocab]
        found = verify(requests, proposals, logits)
        for request, new, count in zip(requests, found, counts, strict=True):
            accepted = len(new) - 1
            request.state.caches[0].truncate(len(request.tokens) + accepted)
            self.settle(request, accepted)
            self.acceptance.add(count, accepted)
        return dict(zip(requests, found, strict=True))
