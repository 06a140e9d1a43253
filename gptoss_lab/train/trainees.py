"""What the phases train: a whole model, or heads on a frozen one."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gptoss_lab.train.attention import Attend, packed, to_device
from gptoss_lab.train.batches import Batch
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.mtp import PredictionHeads, heads_loss


def on_device(model: TrainedModel, batch: Batch, form: str) -> tuple[torch.Tensor, torch.Tensor, Attend]:
    """(rows, positions, attend) of a batch, where the model is."""
    device = model.embedding.device
    rows, positions = (_moved(x, device) for x in (batch.rows, batch.positions))
    return rows, positions, packed(form, batch.offsets, device)


class ModelTrainee:
    """Next-token prediction on what the model has to write. balance: weight of the balance loss. form: of attention."""

    def __init__(self, model: TrainedModel, balance: float, form: str) -> None:
        self.model, self.balance, self.form = model, balance, form

    def loss(self, batch: Batch, quantised: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean cross-entropy, in nats, plus the weighted balance loss."""
        self.model.stored = quantised
        rows, positions, attend = on_device(self.model, batch, self.form)
        hidden, balance = self.model(rows, positions, attend)
        at = _moved(batch.places(), rows.device)
        logits, target = self.model.logits(hidden.index_select(0, at)), rows[at + 1]
        loss = functional.cross_entropy(logits, target)
        with torch.no_grad():
            right = (self.model.likeliest(logits) == target).float().mean()
        scalars = {"loss": loss.detach(), "accuracy": right, "balance": balance.detach()}
        return loss + self.balance * balance, scalars

    def state(self) -> dict[str, Any]:
        """The model's parameters."""
        return self.model.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """See `Trainee`."""
        self.model.load_state_dict(state)


class HeadsTrainee:
    """Heads on a frozen model, which is in its stored form already."""

    def __init__(self, heads: PredictionHeads, model: TrainedModel, form: str) -> None:
        self.heads, self.model, self.form = heads, model, form

    def loss(self, batch: Batch, quantised: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean cross-entropy over the heads; accuracy of each, with the tokens before given."""
        rows, positions, attend = on_device(self.model, batch, self.form)
        with torch.no_grad():
            hidden, _ = self.model(rows, positions, attend)
        places = [_moved(batch.places(2 + j), rows.device) for j in range(len(self.heads.heads))]
        loss, right = heads_loss(self.heads, self.model, hidden, rows, places)
        scalars = {"loss": loss.detach()} | {f"accuracy_{j + 2}": r for j, r in enumerate(right.detach())}
        return loss, scalars

    def state(self) -> dict[str, Any]:
        """The heads' parameters."""
        return self.heads.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """See `Trainee`."""
        self.heads.load_state_dict(state)


@torch.no_grad()
def next_token_scores(model: TrainedModel, batches: list[Batch], form: str) -> dict[str, float]:
    """Mean loss in nats, perplexity and accuracy over all learned tokens of the batches."""
    total = right = count = 0.0
    for batch in batches:
        rows, positions, attend = on_device(model, batch, form)
        at = _moved(batch.places(), rows.device)
        logits = model.logits(model(rows, positions, attend)[0][at])
        total += float(functional.cross_entropy(logits, rows[at + 1], reduction="sum"))
        right += float((model.likeliest(logits) == rows[at + 1]).sum())
        count += len(at)
    loss = torch.tensor(total / count)
    return {"loss": float(loss), "perplexity": float(loss.exp()), "accuracy": right / count, "tokens": count}


def _moved(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An integer array on the device as int64."""
    return to_device(torch.from_numpy(array).long(), device)
