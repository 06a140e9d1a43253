"""Speculative decoding: a small model proposes the next tokens one by one, the large one checks them in one pass.

The draft model has the target's vocabulary, caches of its own, and the request's own sampling parameters. It reads the
prompt beside the target, chunk by chunk. In a round it feeds what it has not seen (one token, or two where all of the
last round's proposals stood: it never fed its own last one), then its own proposals, and is cut back to what stood.

Greedy requests yield exactly what the plain decoder yields, whatever the draft model is; sampled ones are drawn from
exactly the model's distribution, though with a seed not the very tokens of the plain decoder. Whether it is faster is
arithmetic: cost/speculation.py. What is lost: the draft's memory and its k passes, one after the other.
"""
from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.engine.decoders.cached import Model
from gptoss_lab.engine.decoders.drafting import DraftingDecoder
from gptoss_lab.engine.decoders.verify import Proposal, extend
from gptoss_lab.engine.memory import Caches
from gptoss_lab.engine.request import Request
from gptoss_lab.model.paged import PagePool


class SpeculativeDecoder(DraftingDecoder):
    """Drafts with a second model.

    model, draft: called as `Model` says, with equal vocabularies; the draft at least as long. draft_tokens: proposals
    of a round at most, 1 or more. step_tokens: see `CachedDecoder`. pool, draft_pool: pages of each model's caches,
    made with draft >= draft_tokens; None as for `PlainDecoder`. ValueError for models that do not fit together.
    """

    def __init__(
        self, model: Model, draft: Model, draft_tokens: int = 4, step_tokens: int = 8192,
        pool: PagePool | None = None, draft_pool: PagePool | None = None,
    ) -> None:
        ours, theirs = model.config, draft.config
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(f"the draft model has {theirs.vocab_size} token ids and the model {ours.vocab_size}; "
                             "both need the same vocabulary")
        if theirs.max_position_embeddings < ours.max_position_embeddings:
            raise ValueError(f"the draft model's length is {theirs.max_position_embeddings} tokens; the model's "
                             f"{ours.max_position_embeddings} are needed")
        sources = [Caches(model, pool, draft_tokens), Caches(draft, draft_pool, draft_tokens)]
        super().__init__(sources, draft_tokens, step_tokens)

    def follow(self, requests: Sequence[Request]) -> None:
        """The draft reads what the target has read."""
        behind = [r for r in requests if r.state.caches[1].length < self.seen(r)]
        if behind:
            new = [r.tokens[r.state.caches[1].length : self.seen(r)] for r in behind]
            self.forward(behind, new, "none", model=1)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """One pass of the draft for each place of the longest draft."""
        proposals = [Proposal([], []) for _ in requests]
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if count > place]
            going, theirs = [requests[row] for row in rows], [proposals[row] for row in rows]
            new = [[*r.tokens, *p.tokens][r.state.caches[1].length :] for r, p in zip(going, theirs, strict=True)]
            extend(going, theirs, self.forward(going, new, "last", model=1))
        return proposals

    def settle(self, request: Request, accepted: int) -> None:
        """Take back what the draft fed beyond the accepted tokens."""
        cache = request.state.caches[1]
        cache.truncate(min(cache.length, len(request.tokens) + accepted))
