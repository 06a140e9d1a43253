"""The forward pass against OpenAI's own torch model in fp32: the third implementation, on the tiny checkpoint.

The package wants Python 3.12 and a dozen packages that its model does not use: `pip install --no-deps gpt-oss==0.0.9`.
"""
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import distance, tokens

from gptoss_lab.model import load_model

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
if importlib.util.find_spec("gpt_oss") is None:
    pytest.skip("NOT COMPARED WITH OPENAI'S MODEL: gpt-oss 0.0.9 is not installed (it needs Python 3.12)",
                allow_module_level=True)


@pytest.fixture(scope="module")
def openai_model():
    from gpt_oss.torch.model import Transformer

    return Transformer.from_checkpoint(str(TINY / "original"), device="cpu").float()


@pytest.mark.parametrize("layout", ["hf", "original"])
@torch.inference_mode()
def test_fixture_ids(openai_model, layout):
    ids = torch.from_numpy(np.load(TINY / "ids.npy"))
    ours = load_model(TINY / layout, dtype=torch.float32)(ids, logits="all")
    assert distance(ours, openai_model(ids)) <= 1e-5


@torch.inference_mode()
def test_many_windows(openai_model):
    model = load_model(TINY / "hf", dtype=torch.float32)
    ids = tokens(model.config, 400)
    assert distance(model(ids, logits="all"), openai_model(ids)) <= 1e-5
