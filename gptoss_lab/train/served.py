"""Does the lab's own engine, on the expanded checkpoint, write what the trained model wrote?

The whole way is walked: compact file, expansion to the standard checkpoint, its reader, the served model, its engine
with caches. Both sides compute in fp32 on the CPU from the same stored weights, so greedy tokens must be the same ones,
but for a tie within rounding.
"""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gptoss_lab.checkpoint.compact import expand
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.model import load_model
from gptoss_lab.train.evaluate import share
from gptoss_lab.train.generate import greedy
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.vocabulary import Vocabulary


def writer(model: TrainedModel, vocabulary: Vocabulary, limit: int, form: str):
    """Prompts as token ids -> greedy continuations as token ids, by the trained model."""
    stops = frozenset(int(row) for row in vocabulary.compact(model.config.eos_token_ids))

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        rows = greedy(model, [vocabulary.compact(p).tolist() for p in prompts], stops, limit, form)
        return [vocabulary.full(answer) for answer in rows]

    return generate


def served_agreement(
    file: Path, model: TrainedModel, vocabulary: Vocabulary, prompts: Sequence[list[int]], limit: int,
    layouts: Sequence[str] = ("hf", "original"),
) -> dict[str, dict[str, float | int]]:
    """For each layout, how many prompts the served model continues with exactly the trained model's tokens.

    file: the compact checkpoint of `model`, which is in stored form. limit: new tokens. Leaves the model on the CPU, in
    fp32.
    """
    model.to("cpu").dtype = torch.float32
    mine = writer(model, vocabulary, limit, "reference")(list(prompts))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in layouts:
            path = expand(file, Path(folder) / layout, layout)
            engine = Engine(load_model(path, "cpu", torch.float32))
            stops = model.config.eos_token_ids          # the original layout does not say them
            done = engine.complete(prompts, SamplingParams(temperature=0, max_new_tokens=limit, stop_ids=stops))
            found[layout] = share(sum(list(d.tokens) == m for d, m in zip(done, mine, strict=True)), len(mine))
    return found
