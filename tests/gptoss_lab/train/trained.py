"""Small models for the tests of training: random parameters in every tensor, so that no part can be left out unseen."""
from dataclasses import replace

import torch

from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.vocabulary import Vocabulary

TINY = replace(
    preset("nano"), name="tiny", num_layers=3, hidden_size=96, intermediate_size=64, num_experts=5,
    experts_per_token=2, num_heads=6, num_kv_heads=2, vocab_size=700, eos_token_ids=(3, 17), pad_token_id=3,
    sliding_window=16,
)
KEPT = (0, 3, 5, 17, *range(40, 300, 2))


def vocabulary(config: ModelConfig = TINY) -> Vocabulary:
    return Vocabulary(KEPT, config.vocab_size)


def random_model(config: ModelConfig = TINY, seed: int = 0, stored: bool = True) -> TrainedModel:
    """Every parameter random; in stored form, so that the file holds exactly its values."""
    kept = vocabulary(config)
    model = TrainedModel(config, kept.rows, kept.others, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if stored:
        model.store()
    return model
