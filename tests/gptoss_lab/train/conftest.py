"""A small random checkpoint for the tests of the accuracy study, with the vocabulary that its dialogues need."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.compact import write_compact
from gptoss_lab.train.dialogues import render_dialogue
from gptoss_lab.train.evaluate import held_out_set
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.settings import SMOKE
from gptoss_lab.train.study.source import find_rows
from gptoss_lab.train.study.variants import Forms
from gptoss_lab.train.vocabulary import training_vocabulary

CONFIG = replace(SMOKE.model, name="study", num_experts=6, sliding_window=24)
"""Two layers; dialogues are several windows long."""


@pytest.fixture(scope="session")
def studied(tmp_path_factory):
    """file: the compact checkpoint. trained: its model, stored. forms, rows: what the study makes of it. dialogues,
    rendered: held-out ones."""
    folder = tmp_path_factory.mktemp("study")
    vocabulary = training_vocabulary(300)
    model = TrainedModel(CONFIG, vocabulary.rows, vocabulary.others, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.store()
    file = write_compact(folder / "study.safetensors", CONFIG, torch.from_numpy(vocabulary.token_ids),
                         released_tensors(model))
    forms = Forms(file, folder)
    dialogues = held_out_set(8, seed=5)
    return SimpleNamespace(
        file=file, trained=model, vocabulary=vocabulary, forms=forms,
        rows=find_rows(open_checkpoint(forms.path("mxfp4"))), dialogues=dialogues,
        rendered=[render_dialogue(d) for d in dialogues],
    )
