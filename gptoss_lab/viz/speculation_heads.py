"""What a proposal of a prediction head costs in bytes, beside a whole layer of the model and a second model.

gpt-oss ships no heads. Two forms are counted: the one that this project's decoder takes (two matrices on the last
hidden state, no attention; `engine/decoders/mtp.py`), three hidden sizes wide, and one further layer of the model
itself, which is how DeepSeek-V3 does it, with a projection of state and embedding before it. Both read the whole
unembedding for every proposal, and that is most of it.
"""
from __future__ import annotations

from collections.abc import Iterable

from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import H200, SERVED, Precision, decode_bound
from gptoss_lab.cost.precision import BF16_BYTES
from gptoss_lab.cost.speculation import StepSeconds, bound_steps, speedup
from gptoss_lab.viz.table import Table, table

WIDTH = 3
"""Width of a head's middle in hidden sizes, as the nano checkpoint's heads are made."""
CONTEXT = 8192


def unembedding_bytes(config: ModelConfig) -> int:
    """bf16."""
    return BF16_BYTES * config.vocab_size * config.hidden_size


def matrices_bytes(config: ModelConfig) -> int:
    """expand [3 H, 2 H], project [H, 3 H] and norm [H], in bf16."""
    h = config.hidden_size
    return BF16_BYTES * (WIDTH * h * 2 * h + h * WIDTH * h + h)


def head_bytes(config: ModelConfig) -> int:
    """Bytes of one proposal of a head: its matrices and the unembedding."""
    return matrices_bytes(config) + unembedding_bytes(config)


def layer_bytes(config: ModelConfig, batch: int = 1, precision: Precision = SERVED) -> float:
    """Bytes of one proposal of a head that is a layer (a full one) and a projection [H, 2 H], cache included."""
    one = decode_bound(config.with_layers(2), CONTEXT, batch, precision)
    none = decode_bound(config.with_layers(1), CONTEXT, batch, precision)       # the first layer is a sliding one
    layer = sum(b.part.memory_bytes for b in one.parts) - sum(b.part.memory_bytes for b in none.parts)
    return layer + BF16_BYTES * 2 * config.hidden_size**2 + unembedding_bytes(config)


def drafts(target: ModelConfig, small: ModelConfig, batch: int, precision: Precision = SERVED) -> dict[str, float]:
    """Bytes of one proposal for each sequence of a batch, by who makes it."""
    second = sum(b.part.memory_bytes for b in decode_bound(small, CONTEXT, batch, precision).parts)
    return {"head, this project's form": float(head_bytes(target)),
            "head, a layer": layer_bytes(target, batch, precision), small.name: second}


def heads_table(
    target: ModelConfig, small: ModelConfig, batches: Iterable[int], acceptance: float = 0.7,
    precision: Precision = SERVED,
) -> Table:
    """One line per batch and kind of draft: GB, ms at the bandwidth, and the speed-up of one proposal."""
    lines = []
    for batch in batches:
        steps = bound_steps(target, small, CONTEXT, 1, batch, precision)
        for name, size in drafts(target, small, batch, precision).items():
            seconds = size / H200.memory_bytes_per_second
            gain = speedup(acceptance, 1, StepSeconds(steps.target, seconds, steps.verify))
            lines.append([batch, name, f"{size / 1e9:.2f}", f"{1e3 * seconds:.2f}", f"{gain:.2f}", "modelled"])
    return table(lines, ["batch", "who proposes", "GB a proposal", "ms", f"speed-up, k = 1, a = {acceptance}",
                         "origin"])
