"""Plans run live: simulated ranks, real processes, a rank that is late, a prompt that is handed over.

All on a checkpoint of random weights with nano's layers and a small vocabulary, so that dozens of plans take seconds
on a laptop. What a plan does to the arithmetic does not depend on what the weights say.
"""
from __future__ import annotations

import ast
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import gptoss_kernels
from gptoss_lab.cache import cache_folder, made_once
from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.disaggregation import Disaggregated
from gptoss_lab.engine.disaggregation_routes import Pair
from gptoss_lab.engine.ranks import RankEngine, load_share, merged
from gptoss_lab.model import build_model, load_model
from gptoss_lab.parallel import Plan, PlanCollectives, RankError, Ranks, ShardedSource, share_of, simulate
from gptoss_lab.parallel.traffic import read_bytes
from gptoss_lab.viz.table import Table, table

GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


def small_config() -> ModelConfig:
    """nano with 3 layers, a window of 16 and 1021 tokens."""
    return replace(preset("nano"), name="small", num_layers=3, vocab_size=1021, sliding_window=16, eos_token_ids=(2,),
                   pad_token_id=1)


def small_checkpoint() -> Path:
    """Its folder, made at first use."""
    config = small_config()
    digest = hashlib.sha256(json.dumps(config.to_hf_dict(), sort_keys=True).encode()).hexdigest()[:8]
    return made_once(cache_folder() / f"parallel-small-{digest}", lambda path: synth(config, path))


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts for the small checkpoint."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, small_config().vocab_size, (n,), generator=g).tolist() for n in lengths]


# -- every plan against one rank --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checked:
    """A plan's ranks against one rank. difference: largest of the logits over the largest logit. read, planned: bytes
    that each rank read, and that its share says. touched, held: experts per rank, of all layers together."""

    plan: Plan
    difference: float
    read: tuple[int, ...]
    planned: tuple[int, ...]
    touched: tuple[int, ...]
    held: tuple[int, ...]


def check_plans(path: Path, plans: Sequence[Plan], batch: Sequence[Sequence[int]]) -> list[Checked]:
    """Run the prompts under every plan with simulated ranks and compare with an uncut model, in fp32."""
    expected = _last_logits(load_model(path, dtype=torch.float32), batch)
    return [_checked(path, plan, batch, expected) for plan in plans]


def plans_table(found: Sequence[Checked]) -> Table:
    """One line per plan."""
    lines = []
    for one in found:
        same = "as planned" if one.read == one.planned else "NOT as planned"
        lines.append([str(one.plan), f"{one.difference:.1e}", f"{min(one.read):,}–{max(one.read):,}, {same}",
                      " ".join(map(str, one.touched)), " ".join(map(str, one.held)), "live"])
    return table(lines, ["plan", "logits: max difference", "bytes read by a rank", "experts touched, rank by rank",
                         "of those held", "origin"])


@torch.inference_mode()
def _last_logits(model: Any, batch: Sequence[Sequence[int]]) -> torch.Tensor:
    ids = torch.tensor([token for prompt in batch for token in prompt], dtype=torch.int64)
    return model(ids, [len(prompt) for prompt in batch])


def _checked(path: Path, plan: Plan, batch: Sequence[Sequence[int]], expected: torch.Tensor) -> Checked:
    results = simulate(plan.world, _one_rank, path, plan, batch)
    differences = [((logits - expected[own]).abs().max() / expected.abs().max()).item()
                   for logits, own, *_ in results if own]
    config = small_config()
    shares = [share_of(config, plan, rank) for rank in range(plan.world)]
    return Checked(plan, max(differences), tuple(r[2] for r in results),
                   tuple(read_bytes(config, share, "hf") for share in shares), tuple(r[3] for r in results),
                   tuple(config.num_layers * len(share.experts) for share in shares))


def _one_rank(ranks: Any, path: Path, plan: Plan, batch: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    groups = ranks.plan_groups(plan)
    source = ShardedSource(open_checkpoint(path), groups.share(small_config()))
    model = build_model(source, dtype=torch.float32, collectives=PlanCollectives(source.config, groups),
                        share=source.share)
    touched: list[set[int]] = []
    for block in model.layers:
        touched.append(_record(block.moe))
    own = list(range(groups.place.dp, len(batch), plan.dp))
    logits = _last_logits(model, [batch[n] for n in own])
    return logits, own, sum(source.read_bytes.values()), sum(map(len, touched))


def _record(moe: Any) -> set[int]:
    """Which experts a layer computes from now on: a set that fills."""
    seen, inner = set(), moe._moe

    def watched(x: torch.Tensor, ids: torch.Tensor, *given: Any, first_expert: int, **named: Any) -> torch.Tensor:
        held = given[1].values.shape[0]
        seen.update(ids[(ids >= first_expert) & (ids < first_expert + held)].tolist())
        return inner(x, ids, *given, first_expert=first_expert, **named)

    moe._moe = watched
    return seen


# -- what travels ------------------------------------------------------------------------------------------------------
def dispatch_table(path: Path, plan: Plan, batch: Sequence[Sequence[int]]) -> Table:
    """Bytes that ranks received in one prefill under a plan, by exchange: both kinds of dispatch."""
    lines = []
    for kind in ("gather", "all_to_all"):
        found = simulate(plan.world, _traffic, path, plan, batch, kind)
        for name in dict.fromkeys(name for received in found for name in received):
            sizes = [received.get(name, 0.0) for received in found]
            lines.append([str(plan), kind, name, f"{sum(sizes) / len(sizes):,.0f}", f"{max(sizes):,.0f}", "live"])
    return table(lines, ["plan", "dispatch", "exchange", "bytes received, mean", "by the busiest rank", "origin"])


def _traffic(ranks: Any, path: Path, plan: Plan, batch: Sequence[Sequence[int]], kind: str) -> dict[str, float]:
    groups = ranks.plan_groups(plan)
    model = load_share(path, groups, dtype=torch.float32, dispatch=kind)
    _last_logits(model, [batch[n] for n in range(groups.place.dp, len(batch), plan.dp)])
    found: dict[str, float] = {}
    for group in {id(g): g for g in (groups.tensor, groups.data, groups.world)}.values():
        for name, size in group.traffic.received.items():
            short = name.removesuffix(", counts")
            found[short] = found.get(short, 0.0) + size
    return found


# -- real processes ----------------------------------------------------------------------------------------------------
def continue_prompts(ranks: Any, path: Path, plan: Plan, batch: Sequence[Sequence[int]]) -> Any:
    """One rank's work, in a thread or in a process of its own: load its share, write 8 tokens."""
    model = load_share(path, ranks.plan_groups(plan), ranks.device, torch.float32)
    share = model.share
    print(f"{plan}: heads {share.heads.start}-{share.heads.stop - 1}, "
          f"{len(share.experts)} experts of {len(share.expert_rows)} rows")
    return RankEngine(model).complete(batch, GREEDY)


def in_processes(path: Path, plans: Sequence[Plan], batch: Sequence[Sequence[int]]) -> tuple[list[Any], str]:
    """The tokens under each plan by real processes over gloo, on the CPU like `alone`, and the ranks' logs."""
    with Ranks(max(plan.world for plan in plans), "gloo", timeout=60) as ranks:
        tokens = [[c.tokens for c in merged(ranks.run(continue_prompts, path, plan, batch))] for plan in plans]
        return tokens, ranks.logs()


def alone(path: Path, batch: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The tokens of one engine on one rank."""
    return [c.tokens for c in Engine(load_model(path, dtype=torch.float32)).complete(batch, GREEDY)]


def late_rank(seconds: float = 0.5) -> str:
    """Four simulated ranks of which number 2 never comes to the third exchange: the error."""
    never = threading.Event()

    def work(ranks: Any) -> None:
        group = ranks.group(range(4))
        for number in range(3):
            if ranks.rank == 2 and number == 2:
                never.wait(60)
            group.all_reduce(torch.ones(1), f"combine of layer {number}")

    try:
        simulate(4, work, timeout=seconds)
    except RankError as error:
        return str(error)
    finally:
        never.set()
    return "nobody was late"


# -- hand-over ---------------------------------------------------------------------------------------------------------
def hand_over(path: Path, pair: Pair, batch: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Tokens of a prefill and a decode engine, and bytes of keys and values that each decode rank received."""
    def work(ranks: Any) -> Any:
        engine = Disaggregated(ranks, path, pair, dtype=torch.float32, chunk=16, page_size=4)
        found = engine.complete(batch, GREEDY)
        received = engine.everyone.traffic.received
        return found, received.get("pages", 0) + received.get("window", 0)

    results = simulate(pair.world, work)
    sizes = [size for _, size in results[pair.prefill.world :]]
    return [c.tokens for c in merged([found for found, _ in results])], sizes


def kernel_source(name: str) -> str:
    """A function of the all-reduce kernels, as it stands in the file; needs no Triton."""
    file = Path(gptoss_kernels.__file__).parent / "comm" / "kernels.py"
    text = file.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(text, node)
    raise ValueError(f"no function {name!r} among the all-reduce kernels")
