"""What training uses only on a GPU: quick attention, the grouped product, compiled pointwise operations, and all of it
together for a few updates of the real sizes."""
import itertools
import math
from dataclasses import replace

import pytest
import torch

from gptoss_lab.train import experts
from gptoss_lab.train.attention import disagreement
from gptoss_lab.train.batches import make_batch
from gptoss_lab.train.loop import Clock, Log, run_phase
from gptoss_lab.train.model import Pointwise, TrainedModel
from gptoss_lab.train.optimiser import CAP, Optimiser
from gptoss_lab.train.settings import Settings
from gptoss_lab.train.trainees import ModelTrainee
from gptoss_lab.train.vocabulary import training_vocabulary

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing of this can run"),
]


def test_flash_attention_with_sinks_is_the_reference():
    assert disagreement("flash", torch.device("cuda"), torch.bfloat16) is None


def test_the_grouped_product_is_the_loop():
    assert experts.choose_product(torch.device("cuda")) == (True, "grouped kernel")


def test_some_updates_of_the_real_sizes_lower_the_loss():
    device = torch.device("cuda")
    pointwise, how = Pointwise.compiled(device)
    assert how == "compiled"
    vocabulary = training_vocabulary(1_000)
    settings = replace(Settings(), warmup=10, log_every=8)
    model = TrainedModel(settings.model, vocabulary.rows, vocabulary.others, dtype=torch.bfloat16, pointwise=pointwise)
    model.to(device)
    optimiser = Optimiser(model.named_parameters(), muon=settings.muon, adamw=settings.adamw, head_dim=64)
    batches = (make_batch(n, 0, settings.tokens, vocabulary, 131_072) for n in itertools.count())
    log = Log(None)
    run_phase("model", ModelTrainee(model, settings.balance, "flash"), optimiser, batches, Clock(0, steps=40), settings,
              log)
    assert log.rows[0]["loss"] > log.rows[-1]["loss"] and log.rows[-1]["loss"] < 3 and log.rows[-1]["quantised"]
    assert all(math.isfinite(row["loss"]) for row in log.rows)
    for layer in model.layers:
        heads = layer["qkv"].detach().unflatten(0, (-1, 64)).square().mean(dim=(1, 2)).sqrt()
        assert float(heads.max()) * settings.model.hidden_size**0.5 <= CAP * 1.001
