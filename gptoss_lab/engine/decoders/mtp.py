"""Multi-token prediction: small heads on the model's last hidden state propose the tokens after the next one.

gpt-oss ships no such heads; these are of the form that the nano checkpoint's training makes (any file of that form will
do). Head j takes a state and the embedding of the token that follows it, and gives the state one token further on:

    u  = [rms(z), rms(embedding)]         [2 H], no weights in these two norms
    z' = z + project silu(expand u)       expand [F, 2 H], project [H, F]
    logits = unembedding (rms(z') norm)   norm [H]

The first z is the model's hidden state, after its final norm, at the last token it was fed; the token that follows is
known. So head 1 proposes the token after the newest one, and each further head continues from the state and the
proposal before it. There is no attention in a head, so nothing to cache: a sequence keeps one state of H numbers, which
every pass of the model renews. A round checks the proposals like those of a draft model (drafting.py).

What is lost: a head sees the past only through one state, so it guesses worse than a small model; and its proposals are
as many as there are heads.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from gptoss_kernels.reference.norm import rms_norm
from gptoss_lab.engine.decoders.drafting import DraftingDecoder
from gptoss_lab.engine.decoders.verify import Proposal, extend
from gptoss_lab.engine.memory import Caches
from gptoss_lab.engine.request import Request
from gptoss_lab.model import Transformer
from gptoss_lab.model.paged import PagePool

_NAMES = ("expand", "project", "norm")


@dataclass(frozen=True)
class Head:
    """expand: [F, 2 H]. project: [H, F]. norm: [H]. All in the model's dtype, on its device."""

    expand: Tensor
    project: Tensor
    norm: Tensor

    def __call__(self, z: Tensor, embedded: Tensor, eps: float) -> Tensor:
        """z: [N, H], states. embedded: [N, H], of the tokens that follow them -> [N, H], one token further on."""
        plain = z.new_ones(z.shape[-1])
        u = torch.cat([rms_norm(z, plain, eps), rms_norm(embedded, plain, eps)], dim=-1)       # [N, 2 H]
        return z + functional.linear(functional.silu(functional.linear(u, self.expand)), self.project)


def load_heads(path: str | Path, model: Transformer) -> list[Head]:
    """Heads from a safetensors file with heads.j.expand, .project and .norm for j = 0, 1, ...

    ValueError, in one line: no such file, no head in it, a tensor missing or of a shape that does not fit the model.
    """
    try:
        with safe_open(str(path), "pt", device=str(model.device)) as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name).to(model.dtype) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as heads: {str(error).splitlines()[0]}") from None
    count = 1 + max((int(name.split(".")[1]) for name in tensors if _is_of_a_head(name)), default=-1)
    if not count:
        raise ValueError(f"{path} holds no heads; heads.0.expand, heads.0.project and heads.0.norm are expected")
    return [_head(tensors, j, model.config.hidden_size, path) for j in range(count)]


def _is_of_a_head(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 3 and parts[0] == "heads" and parts[1].isdecimal() and parts[2] in _NAMES


def _head(tensors: dict[str, Tensor], j: int, hidden: int, path: str | Path) -> Head:
    missing = [f"heads.{j}.{name}" for name in _NAMES if f"heads.{j}.{name}" not in tensors]
    if missing:
        raise ValueError(f"{path} lacks {missing[0]}")
    head = Head(*(tensors[f"heads.{j}.{name}"] for name in _NAMES))
    shapes = [list(t.shape) for t in (head.expand, head.project, head.norm)]
    width = head.expand.shape[0]
    if shapes != [[width, 2 * hidden], [hidden, width], [hidden]]:
        raise ValueError(f"{path}: head {j} has shapes {shapes}; [F, {2 * hidden}], [{hidden}, F] and [{hidden}] fit "
                         "the model")
    return head


class MtpDecoder(DraftingDecoder):
    """Drafts with heads on the model's hidden state.

    model: a `Transformer` (its embedding, unembedding and hidden states are used). heads: 1 or more, in order; a round
    proposes as many tokens. step_tokens, pool: see `SpeculativeDecoder`. ValueError.
    """

    def __init__(
        self, model: Transformer, heads: Sequence[Head], step_tokens: int = 8192, pool: PagePool | None = None
    ) -> None:
        if not heads:
            raise ValueError("there are 0 heads; at least 1 is expected")
        self.heads = list(heads)
        super().__init__([Caches(model, pool, len(self.heads))], len(self.heads), step_tokens)

    @torch.inference_mode()
    def forward(self, requests: Sequence[Request], new: Sequence[Sequence[int]], logits: str, model: int = 0) -> Any:
        """As always, and each request keeps its hidden states: of its last token, or of all of a round."""
        ids = torch.tensor([token for tokens in new for token in tokens], device=self.model.device)
        lengths = [len(tokens) for tokens in new]
        result = self.model(ids, lengths, [r.state.caches[0] for r in requests], logits=logits, hidden=True)
        if result is None:
            for request in requests:
                request.state.hidden = None              # of a token before its last
            return None
        rows, states = result
        for request, own in zip(requests, states.split(lengths if logits == "all" else 1), strict=True):
            request.state.hidden = own if logits == "all" else own[0]
        return rows

    def may_draft(self, request: Request) -> bool:
        """Only with the state of the token before the one that is to be fed."""
        return super().may_draft(request) and request.state.hidden is not None

    def settle(self, request: Request, accepted: int) -> None:
        """Keep the state of the last token that stood."""
        request.state.hidden = request.state.hidden[accepted].clone()

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """One head for each place."""
        proposals = [Proposal([], []) for _ in requests]
        z = torch.stack([request.state.hidden for request in requests])                        # [N, H]
        eps = self.model.config.rms_norm_eps
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if count > place]
            going, theirs = [requests[row] for row in rows], [proposals[row] for row in rows]
            last = [[*r.tokens, *p.tokens][-1] for r, p in zip(going, theirs, strict=True)]
            embedded = self.model.embedding(torch.tensor(last, device=z.device)).to(z.dtype)
            head = self.heads[place]
            z[rows] = head(z[rows], embedded, eps)
            state = rms_norm(z[rows], head.norm, eps)
            extend(going, theirs, self.model.unembedding(state).to(torch.promote_types(z.dtype, torch.float32)))
        return proposals
