"""How many experts a verification touches: neighbours in a text, tokens from all over it, and even choice.

A pass over k + 1 tokens reads the experts of all of them. With even and independent choice that is nearly k + 1 times
as many as for one token, which is what makes checking dear. Two things lessen it: a router that prefers some experts,
and neighbours that agree. They are told apart by taking the same number of tokens from places far apart: what these
share is preference, what neighbours share beyond that is agreement.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import expected_distinct_experts
from gptoss_lab.model import Recorder, Transformer
from gptoss_lab.viz import style


@dataclass(frozen=True)
class Shared:
    """Distinct experts of a layer that `tokens` tokens touch, mean over layers and places."""

    tokens: int
    neighbours: float
    far_apart: float
    even: float

    @property
    def share(self) -> float:
        """What neighbours touch, over even choice."""
        return self.neighbours / self.even


@torch.inference_mode()
def routed(model: Transformer, ids: Sequence[int]) -> torch.Tensor:
    """[layers, T, k] int64: the experts that each token of a text is sent to."""
    recorder = Recorder("router_ids")
    model(torch.tensor(ids, device=model.device), logits="none", observe=recorder)
    return recorder.stacked("router_ids")


def distinct(ids: torch.Tensor) -> int:
    """Different experts among ids of any shape."""
    return int(ids.unique().numel())


def shared(config: ModelConfig, experts: torch.Tensor, counts: Iterable[int]) -> list[Shared]:
    """experts: [layers, T, k]. counts: tokens of a pass. ValueError for more than the text has."""
    found, length = [], experts.shape[1]
    for n in counts:
        if not 1 <= n <= length:
            raise ValueError(f"{n} tokens of a text of {length}; 1 to {length} are expected")
        groups = length // n
        near = experts[:, : groups * n].unflatten(1, (groups, n))              # [layers, groups, n, k]
        far = experts[:, : groups * n].unflatten(1, (n, groups)).transpose(1, 2)
        means = [sum(map(distinct, kind.flatten(0, 1))) / (groups * experts.shape[0]) for kind in (near, far)]
        found.append(Shared(n, *means, expected_distinct_experts(config, n)))
    return found


def figure(found: Sequence[Shared], what: str) -> go.Figure:
    """Experts of a layer against tokens of a pass."""
    fig, tokens = go.Figure(), [one.tokens for one in found]
    fig.add_scatter(x=tokens, y=[one.even for one in found], mode="lines", name="even, independent choice (modelled)",
                    line={"color": style.GREY, "dash": "dot"})
    fig.add_scatter(x=tokens, y=[one.far_apart for one in found], mode="lines+markers", name="tokens from far apart",
                    line={"color": style.OCHRE})
    fig.add_scatter(x=tokens, y=[one.neighbours for one in found], mode="lines+markers", name="neighbours in the text",
                    line={"color": style.BLUE})
    fig.update_xaxes(title_text="tokens of a pass, k + 1", dtick=1)
    fig.update_yaxes(title_text="experts of a layer", rangemode="tozero")
    last = found[-1]
    title = (f"{last.tokens} neighbours touch {last.neighbours:.1f} experts of a layer, far-apart tokens "
             f"{last.far_apart:.1f}, even choice {last.even:.1f}")
    return style.finish(fig, title, "live", what, legend={"y": -0.22})
