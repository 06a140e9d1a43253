"""Sizes and rates of a run: for an H200, for a rehearsal there, and one that shows on a CPU that everything works."""
from __future__ import annotations

from dataclasses import dataclass, replace

from gptoss_lab.config import ModelConfig, preset

PHASES = ("model", "heads", "draft")
DRAFT = replace(
    preset("nano"), name="nano-draft", num_layers=3, hidden_size=128, intermediate_size=192, num_experts=8,
    experts_per_token=2, num_heads=4, num_kv_heads=1,
)
"""The draft model: the same architecture and vocabulary, 2.0 million parameters besides the embeddings."""


@dataclass(frozen=True)
class Settings:
    """tokens: of a batch. workers: processes that make batches. shares: of the training time, by phase. steps: instead
    of time, a number of updates by phase. muon, adamw: learning rates. quantise_from: progress of the phase from which
    weights go through their stored form. save_every, keep_every: seconds between states on disk, and in memory.
    evaluation: held-out problems. far: recall problems beyond 4,096 tokens. spare: seconds kept for evaluation and
    writing.
    """

    model: ModelConfig = preset("nano")
    draft: ModelConfig = DRAFT
    tokens: int = 32_768
    workers: int = 12
    shares: tuple[float, float, float] = (0.80, 0.06, 0.14)
    steps: tuple[int, int, int] | None = None
    muon: float = 0.02
    adamw: float = 0.006
    warmup: int = 100
    decay_from: float = 0.5
    quantise_from: float = 0.75
    balance: float = 0.01
    log_every: int = 20
    save_every: float = 60.0
    keep_every: float = 10.0
    evaluation: int = 4_000
    far: int = 100
    answer_tokens: int = 224
    spare: float = 60.0
    vocabulary_sample: int = 10_000


REHEARSAL = Settings(steps=(200, 30, 60), evaluation=200, far=8)
"""The real sizes for a minute: does everything work on this machine, and how fast?"""
SMOKE = Settings(
    model=replace(
        preset("nano"), name="nano", num_layers=2, hidden_size=64, intermediate_size=64, num_experts=4,
        experts_per_token=2, num_heads=4, num_kv_heads=2,
    ),
    draft=replace(
        preset("nano"), name="nano-draft", num_layers=1, hidden_size=32, intermediate_size=32, num_experts=2,
        experts_per_token=1, num_heads=2, num_kv_heads=1,
    ),
    tokens=2_048, workers=0, steps=(60, 10, 20), warmup=5, log_every=10, evaluation=12, far=0, answer_tokens=40,
    spare=0.0, vocabulary_sample=1_000,
)
