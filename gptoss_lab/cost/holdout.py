"""Which measurements no fit may see: a rule, not a choice made after looking at the results.

All of length 65,536, all of batch 8, all on two GPUs. Each asks the model for something it was not shown: a length
between two others, a batch between two others, the first step from one GPU to several.
"""
from __future__ import annotations

HELD_OUT_TOKENS = 65536
HELD_OUT_BATCH = 8
HELD_OUT_GPUS = 2


def held_out(tokens: int | None, batch: int | None, gpus: int) -> bool:
    """Whether a measurement of that prompt or context length, batch and number of GPUs is kept from every fit."""
    return tokens == HELD_OUT_TOKENS or batch == HELD_OUT_BATCH or gpus == HELD_OUT_GPUS
