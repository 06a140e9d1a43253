"""One rank's share of the model that the multi-GPU benches time, in the fast forward or the plain one.

The fast forward runs every plan but a split sequence over several data-parallel groups, which is the plain one's; rows
say which ran. A rank keeps its heads, experts and rows of the head, and the whole embedding: looking a row up moves
nothing, and a cut one would be summed over the ranks at every step.

Weights come from a checkpoint or are made on the device, the same bytes on every rank and for every plan.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gptoss_kernels.reference.norm import rms_norm
from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.manifest import TensorSpec, manifest
from gptoss_lab.checkpoint.synthetic import Synthetic
from gptoss_lab.config import ModelConfig
from gptoss_lab.model import build_model
from gptoss_lab.model.fast import FastWeights, fast_share, lay_out_share
from gptoss_lab.parallel import Plan, PlanCollectives, ShardedSource
from gptoss_lab.parallel.collectives import PlanGroups


class Made:
    """`Synthetic` in the shape of an opened checkpoint, so that a share can be cut from it; tensors are made whole, on
    `device`, one at a time."""

    layout, experts_order = "hf", "out_in"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self._device, self._source = config, device, Synthetic(config)
        self._specs: dict[str, TensorSpec] = {spec.name: spec for spec in manifest(config, "hf")}

    def stored(self, name: str) -> Any:
        """Only the shape."""
        return SimpleNamespace(shape=self._specs[name].shape)

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A whole tensor."""
        return self._source.tensor(name, device or self._device)

    def rows(self, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Rows of the first axis, in memory of their own."""
        return self.tensor(name, device)[start:stop].clone()


@dataclass(frozen=True)
class RankSubject:
    """What is timed: the model's shapes, where its weights are from (None: made), the plan, the forms of the weights.
    """

    config: ModelConfig
    plan: Plan
    experts: str
    checkpoint: Path | None = None
    projections: str = "dense"

    @property
    def fast(self) -> bool:
        """Whether the fast forward can run the plan."""
        return self.plan.dp == 1 or not self.plan.sequence_split

    @property
    def backend(self) -> str:
        """How rows name what ran."""
        if not self.fast:
            return f"plain, {self.experts} experts"
        return f"fast, {self.experts} experts, {self.projections} projections"

    @property
    def conditions(self) -> dict[str, Any]:
        """Of every row."""
        plan = self.plan
        return {"model": self.config.name, "layers": self.config.num_layers, "ep": plan.ep, "dp": plan.dp,
                "tp": plan.tp, "sequence_split": plan.sequence_split, "experts": self.experts,
                "projections": self.projections if self.fast else "dense",
                "weights": "made" if self.checkpoint is None else self.checkpoint.name}


def source_of(subject: RankSubject, device: torch.device) -> Any:
    """The checkpoint, or what stands for one."""
    return Made(subject.config, device) if subject.checkpoint is None else open_checkpoint(subject.checkpoint)


def fast_weights(subject: RankSubject, groups: PlanGroups, device: torch.device, dtype: torch.dtype) -> FastWeights:
    """This rank's share, laid out for the kernels."""
    return lay_out_share(source_of(subject, device), groups.share(subject.config), device, dtype,
                         experts=subject.experts, projections=subject.projections)


@torch.inference_mode()
def centre_routers(weights: FastWeights, groups: PlanGroups, tokens: int = 1024) -> None:
    """Set the router biases of random weights so that experts are used about evenly, the same on every rank.

    As `fast_model.centre_routers` for one rank: minus the mean logit of an expert on a random prompt. Here the mean is
    over what all ranks saw: the same rows everywhere, or each rank its own part of a split prompt.
    """
    model = fast_share(weights, groups, tokens=tokens, sequences=1, graphs=False, rank_rows=tokens)

    def centre(what: str, layer: int, x: torch.Tensor) -> None:
        moe = weights.layers[layer].moe
        logits = rms_norm(x, moe.norm, moe.norm_eps).float() @ moe.router.float().T
        seen = torch.cat([logits.sum(dim=0), logits.new_tensor([len(x)])])       # [E + 1]
        total = groups.world.all_reduce(seen, "router logits")
        moe.router_bias.copy_(-total[:-1] / total[-1])

    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, weights.config.vocab_size, (tokens,), generator=g).to(weights.device)
    model(ids, logits="none", observe=centre)


def plain_model(subject: RankSubject, groups: PlanGroups, device: torch.device, dtype: torch.dtype) -> Any:
    """The plain forward over this rank's share."""
    share = groups.share(subject.config)
    collectives = PlanCollectives(subject.config, groups)
    storage = "dense" if subject.experts == "dense" else "stored"
    return build_model(ShardedSource(source_of(subject, device), share), device, dtype, expert_storage=storage,
                       collectives=collectives, share=share)
