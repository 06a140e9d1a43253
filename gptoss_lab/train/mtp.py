"""Heads that predict further ahead: from the last hidden state, the tokens after the next one.

The model's hidden state at t gives token t + 1. Head 1 takes that state and the embedding of token t + 1 and gives
t + 2; head 2 takes head 1's state and the embedding of t + 2 and gives t + 3; and so on. A head is a small gate-free
MLP on both, added to the state, and reads its logits through the model's own unembedding. There is no attention in it
and so no cache: a decoder that drafts with heads keeps nothing but the last hidden state.

    u  = cat(rms(z), rms(e))              [2 H], no weights in these two norms
    z' = z + project silu(expand u)       expand [F, 2 H], project [H, F]
    logits = unembedding rms(z', norm)    norm [H]

The trunk is frozen: heads cost it nothing and can be trained, or left out, afterwards.
"""
from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from gptoss_kernels.reference.norm import rms_norm
from gptoss_lab.train.model import TrainedModel

HEADS = 2
WIDTH = 3
"""Width of a head's middle, in hidden sizes."""


class PredictionHeads(nn.Module):
    """Parameters for head j = 0, 1, ...: `heads.j.expand` [F, 2 H], `heads.j.project` [H, F], `heads.j.norm` [H]."""

    def __init__(self, hidden: int, eps: float, heads: int = HEADS, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        f = WIDTH * hidden
        self.eps = eps
        self.heads = nn.ModuleList(
            nn.ParameterDict({
                "expand": torch.randn(f, 2 * hidden, generator=generator) / math.sqrt(2 * hidden),
                "project": torch.randn(hidden, f, generator=generator) * 0.5 / math.sqrt(f),
                "norm": torch.ones(hidden),
            })
            for _ in range(heads)
        )

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """hidden: [N, H], the model's, after its final norm, at t. embedded: [N, heads, H], of tokens t + 1, t + 2, ...
        Returns for each head [N, H], what the unembedding takes.
        """
        states, z, plain = [], hidden, hidden.new_ones(hidden.shape[-1])
        for head, e in zip(self.heads, embedded.unbind(dim=1), strict=True):
            u = torch.cat([rms_norm(z, plain, self.eps), rms_norm(e, plain, self.eps)], dim=-1)
            middle = functional.silu(functional.linear(u, head["expand"].to(u.dtype)))
            z = z + functional.linear(middle, head["project"].to(u.dtype))
            states.append(rms_norm(z, head["norm"], self.eps))
        return states


def heads_loss(
    heads: PredictionHeads, model: TrainedModel, hidden: torch.Tensor, rows: torch.Tensor, places: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the heads and, for each head, how many of its places it gets right.

    hidden: [T, H]. rows: [T]. places: for each head, the t whose token it has to predict (learned, same dialogue).
    """
    losses, right = [], []
    for j, at in enumerate(places):
        ahead = torch.stack([model.embed(rows[at + 1 + i]) for i in range(j + 1)], dim=1)
        pad = ahead.new_zeros(len(at), len(heads.heads) - j - 1, ahead.shape[-1])
        state = heads(hidden[at], torch.cat([ahead, pad], dim=1))[j]
        logits, target = model.logits(state), rows[at + 2 + j]
        losses.append(functional.cross_entropy(logits, target))
        right.append((model.likeliest(logits) == target).float().mean())
    return torch.stack(losses).mean(), torch.stack(right)


def save_heads(heads: PredictionHeads, file: Path) -> None:
    """bf16 safetensors with the parameters' names; metadata says what they are."""
    tensors = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in heads.named_parameters()}
    part = file.with_name(file.name + ".part")
    save_file(tensors, part, metadata={"format": "pt", "kind": "mtp-heads", "heads": str(len(heads.heads))})
    part.chmod(0o644)
    part.replace(file)
