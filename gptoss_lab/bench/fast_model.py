"""The model that `bench prefill`, `bench decode` and `profile` measure: laid out once, with what that took.

From a checkpoint, or synthesised on the device from random MXFP4 codes, layer by layer, so that 120B with FP8 experts
needs neither a disk nor a host that could hold it. Random weights change neither bytes nor arithmetic, but with depth
the tokens of a random model come to agree, and then on experts too: at layer 36 the favourite of 64 would get six times
its share. So random routers are centred: each bias is set to minus the mean logit that a random prompt gives its
expert. How evenly experts are then used is measured, not assumed.
"""
from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.reference.moe import route
from gptoss_kernels.reference.norm import rms_norm
from gptoss_lab.bench import ceilings
from gptoss_lab.bench.convert import PeakMemory
from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.synthetic import Synthetic
from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import Precision
from gptoss_lab.model.fast import FastTransformer, FastWeights, lay_out, make_pool
from gptoss_lab.results import make_row, read_rows, write_rows

Row = dict[str, Any]
RANDOM = "random, of the real shapes; router biases such that the mean logit of every expert is 0 on a random prompt"
CENTRING_TOKENS = 1024


@dataclass(frozen=True)
class Subject:
    """What is measured: a model's shapes, the forms of its weights, where it runs.

    experts: "fp8", "mxfp4" or "dense". projections: "fp8" or "dense". checkpoint: a folder, or None for random weights.
    """

    config: ModelConfig
    experts: str
    projections: str
    device: torch.device
    checkpoint: Path | None = None

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU; fp32 on the CPU, whose plain kernels are checked in it."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def precision(self) -> Precision:
        """What the bound is computed for. Packed MXFP4 is multiplied as e4m3 by the kernels here."""
        return Precision("bf16" if self.experts == "dense" else self.experts,
                         "bf16" if self.projections == "dense" else "fp8", mxfp4_unit="fp8")

    @property
    def conditions(self) -> dict[str, Any]:
        """Of every row."""
        return {"model": self.config.name, "ep": 1, "dp": 1, "tp": 1, "layers": self.config.num_layers,
                "experts": self.experts, "projections": self.projections, "kv": str(self.dtype).removeprefix("torch."),
                "weights": RANDOM if self.checkpoint is None else self.checkpoint.name}

    @property
    def backend(self) -> str:
        """How rows name what ran."""
        return f"fast, {self.experts} experts, {self.projections} projections"


def loaded(subject: Subject) -> tuple[FastWeights, list[Row]]:
    """The weights on their device; rows of suite "load": seconds, peak host bytes above start, peak device bytes.

    On a GPU the rows begin with its ceilings (a copy, large products), measured before: the clocks of this run, by
    which its times are to be judged.
    """
    source = Synthetic(subject.config) if subject.checkpoint is None else open_checkpoint(subject.checkpoint)
    on_gpu = subject.device.type == "cuda"
    rows = ceilings.bench(8, 0.3) if on_gpu else []
    give_back(subject.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(subject.device)
    with PeakMemory() as peak:
        begin = time.perf_counter()
        weights = lay_out(source, subject.device, subject.dtype, experts=subject.experts,
                          projections=subject.projections)
        if subject.checkpoint is None:
            centre_routers(weights)
        synchronise(subject.device)
        seconds = time.perf_counter() - begin
    case = "lay out for the kernels, " + ("synthesised on the device" if subject.checkpoint is None else "from disk")
    facts = subject.conditions | {"weight_bytes": weights.bytes, "rounding": weights.rounding}
    measured = [("seconds", seconds, "s", ""), ("bytes", peak.bytes, "bytes", ", peak host memory above start")]
    if on_gpu:
        measured.append(("bytes", torch.cuda.max_memory_allocated(subject.device), "bytes", ", peak device memory"))
    give_back(subject.device)
    return weights, rows + [
        make_row("load", case + more, subject.backend, metric, [value], unit, statistic="single", **facts)
        for metric, value, unit, more in measured
    ]


def centre_routers(weights: FastWeights, tokens: int = CENTRING_TOKENS) -> None:
    """Set the router biases of random weights so that experts are used about evenly, layer by layer in one pass.

    Writes the biases in place; whoever shares these tensors sees them. tokens: of the random prompt.
    """
    model = FastTransformer(weights, make_pool(weights, tokens=tokens, sequences=1))

    def centre(what: str, layer: int, x: torch.Tensor) -> None:
        moe = weights.layers[layer].moe
        logits = rms_norm(x, moe.norm, moe.norm_eps).float() @ moe.router.float().T
        moe.router_bias.copy_(-logits.mean(dim=0))

    model(random_ids(weights.config, tokens, weights.device, seed=2), logits="none", observe=centre)


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Free what earlier cases left: a model and its captured steps know each other, so only the collector ends them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """Device memory that could still be taken, what the allocator holds unused included; None on the CPU."""
    give_back(device)
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def random_ids(config: ModelConfig, count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[count] int64 random token ids."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (count,), generator=g).to(device)


def expert_use(model: FastTransformer, run: Callable[[Callable[..., None]], object]) -> dict[str, float]:
    """What the router did in one step: run(observe) makes the step.

    Returns experts_hit, the mean over layers of how many experts got a row, and largest_share, of one expert among a
    layer's rows, the largest of all layers.
    """
    hit, largest = [], []

    def look(what: str, layer: int, x: torch.Tensor) -> None:
        moe = model.weights.layers[layer].moe
        normed = rms_norm(x, moe.norm, moe.norm_eps).float()
        ids, _ = route(normed @ moe.router.float().T + moe.router_bias.float(), moe.experts_per_token)
        counts = torch.bincount(ids.flatten(), minlength=moe.router.shape[0])
        hit.append(int((counts > 0).sum()))
        largest.append(float(counts.max() / counts.sum()))

    run(look)
    return {"experts_hit": round(sum(hit) / len(hit), 2), "largest_share": round(max(largest), 4)}


class Budget:
    """Seconds that a run may take, counted from when it is made; None for any."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self._begin = seconds, time.perf_counter()

    def left(self) -> float:
        """Seconds left."""
        spent = time.perf_counter() - self._begin
        return float("inf") if self.seconds is None else self.seconds - spent


class Rows:
    """The rows of a run: written to `path` (None: nowhere) as each is measured; those that are there are not measured
    again."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.all = path, []
        there = read_rows(path) if path is not None and path.exists() else []
        self._done = {_identity(row) for row in there if row["value"] is not None}

    def has(self, suite: str, case: str, subject: Subject, **conditions: int) -> bool:
        """Whether a value for this was written before."""
        return (suite, case, subject.backend, *_key(subject.conditions | conditions)) in self._done

    def add(self, rows: Iterable[Row]) -> None:
        """Keep and write."""
        new = list(rows)
        self.all += new
        if self.path is not None:
            write_rows(self.path, new)


def _identity(row: Row) -> tuple[Any, ...]:
    return (row["suite"], row["case"], row["backend"], *_key(row["conditions"]))


def _key(conditions: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(conditions.get(name) for name in ("model", "layers", "weights", "batch", "tokens"))
