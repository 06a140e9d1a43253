"""Checkpoints, prompts and one rank's work, for tests that compare ranks with one rank."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.model import Recorder, load_model
from gptoss_lab.model.transformer import Transformer
from gptoss_lab.parallel.collectives import PlanCollectives
from gptoss_lab.parallel.plan import Plan
from gptoss_lab.parallel.source import ShardedSource

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
TOLERANCE = 1e-5        # largest difference of fp32 logits over the largest logit


def small_nano(**changes: Any) -> ModelConfig:
    """nano with an odd small vocabulary and 2 layers: 8 query heads on 2, 16 experts of 288, window 128."""
    base = {"name": "small", "num_layers": 2, "vocab_size": 1021, "sliding_window": 16, "eos_token_ids": (2,),
            "pad_token_id": 1}
    return replace(preset("nano"), **(base | changes))


def tokens(config: ModelConfig, count: int, seed: int = 0) -> torch.Tensor:
    """[count] random ids."""
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference over largest absolute value of b."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def load(path: Path, ranks: Any, plan: Plan, dtype: torch.dtype = torch.float32, **options: Any) -> Transformer:
    """This rank's share of a checkpoint, with its collectives."""
    groups = ranks.plan_groups(plan)
    config = open_checkpoint(path).config
    chosen = {name: options.pop(name) for name in ("dispatch", "full_logits") if name in options}
    collectives = PlanCollectives(config, groups, **chosen)
    return load_model(path, dtype=dtype, share=groups.share(config), collectives=collectives, **options)


def own_sequences(plan: Plan, rank: int, count: int) -> list[int]:
    """Numbers of the sequences that the rank's data-parallel group serves: every dp-th."""
    return list(range(rank // plan.tp, count, plan.dp))


@torch.inference_mode()
def run(model: Transformer, sequences: Sequence[torch.Tensor], chunks: Sequence[int] = ()) -> torch.Tensor:
    """Prefill of all sequences in one step (or in chunks), then two decode steps of token 5; logits of all steps.

    Returns [steps, sequences, V]; a rank without sequences takes the same steps.
    """
    caches = [model.new_cache() for _ in sequences]
    longest = max([len(s) for s in sequences], default=0)
    edges = [0, *chunks, 10**9]
    found = []
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        parts = [s[a:b] for s in sequences]
        live = [n for n, part in enumerate(parts) if len(part)]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        last = model(ids, [len(parts[n]) for n in live], [caches[n] for n in live], logits="last")
        if b > longest:
            found.append(last)
    for _ in range(2):
        ids = torch.full((len(sequences),), 5)
        found.append(model(ids, [1] * len(sequences), caches, logits="last"))
    return torch.stack(found)


def work(ranks: Any, path: Path, plan: Plan, sequences: Sequence[torch.Tensor], **options: Any) -> dict[str, Any]:
    """What one rank does in the equality tests: load, run its sequences, report logits, touched experts, traffic."""
    model = load(path, ranks, plan, **options)
    own = own_sequences(plan, ranks.rank, len(sequences))
    touched: list[set[int]] = []
    calls = []
    for block in model.layers:
        _count(block, touched, calls)
    logits = run(model, [sequences[n] for n in own])
    return {
        "own": own, "logits": logits, "touched": touched, "rows": calls, "share": model.share,
        "held": {name: p.shape for name, p in model.named_parameters()},
        "held_bytes": {name: p.nbytes for name, p in model.named_parameters()},
        "traffic": {name: (dict(g.traffic.calls), dict(g.traffic.received)) for name, g in
                    (("tensor", model.ranks.groups.tensor), ("data", model.ranks.groups.data),
                     ("world", model.ranks.groups.world))},
    }


def _count(block: Any, touched: list[set[int]], calls: list[int]) -> None:
    """Wrap a layer's experts so that which of them computed something, and for how many choices, is on record."""
    inner, moe = block.moe._moe, block.moe
    seen: set[int] = set()
    touched.append(seen)

    def counted(x, ids, weights, gate_up, *args, first_expert, **named):
        here = ids[(ids >= first_expert) & (ids < first_expert + gate_up.values.shape[0])]
        seen.update(here.tolist())
        calls.append(len(here))
        return inner(x, ids, weights, gate_up, *args, first_expert=first_expert, **named)

    moe._moe = counted


def one_rank(path: Path, sequences: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    """The same by a model that nobody cut."""
    return run(load_model(path, dtype=torch.float32, **options), sequences)


def chosen_experts(path: Path, sequences: Sequence[torch.Tensor]) -> list[set[int]]:
    """The experts that the router of an uncut model picks in each layer, over the steps of `run`."""
    model, record = load_model(path, dtype=torch.float32), Recorder("router_ids")
    forward = model.forward
    model.forward = lambda *given, **named: forward(*given, **(named | {"observe": record}))
    run(model, sequences)
    return [set(torch.cat(found).flatten().tolist()) for _, found in sorted(record.values["router_ids"].items())]


def source(path: Path, share: Any) -> ShardedSource:
    """A checkpoint as one rank sees it."""
    return ShardedSource(open_checkpoint(path), share)
