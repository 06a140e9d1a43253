"""Prefill on one rank, decode on another: the hand-over alone, what of it hides behind the prefill, the first token.

Two ranks hold the whole model each. Rank 0 reads a prompt; rank 1 gets its keys and values and makes one decode step.

    hand-over        all layers sent when the prompt has been read: GB/s
    prefill          rank 0 alone
    together         every layer sent while the next is computed: hidden = 1 - (together - prefill) / hand-over
    first token      from the prompt to the second token (the first that the decode engine makes), and the same by one
                     engine that does both on rank 0

Before anything is timed the two tokens must be those of one engine. On CPU ranks with nano every line runs but NCCL's.

    gptoss-lab bench disaggregation --model gpt-oss-20b --tokens 8192        two GPUs
"""
from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.bench.rank_model import RankSubject, centre_routers, fast_weights
from gptoss_lab.config import ModelConfig
from gptoss_lab.cost.hardware import H200
from gptoss_lab.engine.disaggregation_layers import LayerSender, receive_layers
from gptoss_lab.engine.disaggregation_routes import Pair, Route, handover_bytes
from gptoss_lab.model.fast import FastTransformer, fast_share
from gptoss_lab.parallel import Plan, Ranks, TorchRanks
from gptoss_lab.parallel.groups import Group
from gptoss_lab.results import make_row, write_rows

PAIR = Pair(Plan(), Plan())
WARM = 2
_HELD: dict[str, Any] = {}


@dataclass(frozen=True)
class Half:
    """One rank's engine: its model, whom it exchanges with, and what of the cache goes where."""

    own: TorchRanks
    everyone: Group
    model: FastTransformer
    routes: list[Route]

    @property
    def reads(self) -> bool:
        """Whether this is the prefill rank."""
        return self.own.rank == 0


def prepare(own: TorchRanks, subject: RankSubject) -> int:
    """Lay the whole model out on this rank, the same on both. Returns the bytes of its weights."""
    _HELD.clear()
    gc.collect()
    dtype = torch.bfloat16 if own.device.type == "cuda" else torch.float32
    both = [own.plan_groups(plan, first) for plan, first in ((PAIR.prefill, 0), (PAIR.decode, 1))]
    groups = next(found for found in both if found is not None)
    weights = fast_weights(subject, groups, own.device, dtype)
    if subject.checkpoint is None:
        centre_routers(weights, groups)
    _HELD.update(weights=weights, groups=groups, everyone=own.group(range(own.world)))
    return weights.bytes


@torch.inference_mode()
def measure(own: TorchRanks, tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every part on this rank, reading by reading; RuntimeError if the tokens are not one engine's."""
    model = fast_share(_HELD["weights"], _HELD["groups"], tokens=tokens + 64, sequences=1, sizes=(1,),
                       max_kv_len=tokens + 64)
    routes = PAIR.routes(model.config, 0)
    half = Half(own, _HELD["everyone"], model, routes)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=g).to(own.device)
    parts: dict[str, Callable[[Half, torch.Tensor], list[int] | None]] = {
        "prefill": _prefill, "hand-over": _hand_over, "together": _together, "first token": _first_token,
        "one engine": _one_engine}
    found: dict[str, list[float]] = {name: [] for name in parts}
    for reading in range(repetitions + WARM):
        told = {}
        for name, part in parts.items():
            _meet(half)
            begin = time.perf_counter()
            told[name] = part(half, ids)
            _meet(half)
            if reading >= WARM:
                found[name].append(time.perf_counter() - begin)
        _compare(half, told["first token"], told["one engine"])
    return found


def _read(half: Half, ids: torch.Tensor, observe: Callable[..., None] | None = None, cache: Any = None) -> Any:
    """A prompt through the model; returns its cache and its first token [1] on the device."""
    cache = half.model.new_cache() if cache is None else cache
    logits = half.model(ids, [len(ids)], [cache], observe=observe)
    return cache, logits.argmax(dim=1)


def _prefill(half: Half, ids: torch.Tensor) -> None:
    if half.reads:
        _read(half, ids)[0].release()


def _hand_over(half: Half, ids: torch.Tensor) -> None:
    """All layers of a cache that is there already (what it holds does not matter)."""
    cache = half.model.new_cache()
    if half.reads:
        cache.reserve(len(ids))
        sender = LayerSender(half.everyone, half.routes, cache, len(ids))
        for layer in range(half.model.config.num_layers):
            sender("moe_input", layer, ids)
        sender.finish()
    else:
        receive_layers(half.everyone, half.routes, cache, len(ids))
    cache.release()


def _pass_on(half: Half, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A prompt read by one rank and taken over by the other; the first token on both."""
    cache = half.model.new_cache()
    if half.reads:
        sender = LayerSender(half.everyone, half.routes, cache, len(ids))
        _, token = _read(half, ids, sender, cache)
        half.everyone.send(token, 1, "first token")()
        sender.finish()
        return cache, token
    receive_layers(half.everyone, half.routes, cache, len(ids))
    return cache, half.everyone.receive(torch.empty(1, dtype=torch.int64, device=ids.device), 0, "first token")


def _together(half: Half, ids: torch.Tensor) -> None:
    _pass_on(half, ids)[0].release()


def _first_token(half: Half, ids: torch.Tensor) -> list[int] | None:
    cache, token = _pass_on(half, ids)
    second = None if half.reads else half.model(token, [1], [cache]).argmax(dim=1)
    cache.release()
    return None if second is None else [int(token), int(second)]


def _one_engine(half: Half, ids: torch.Tensor) -> list[int] | None:
    if not half.reads:
        return None
    cache, token = _read(half, ids)
    second = half.model(token, [1], [cache]).argmax(dim=1)
    cache.release()
    return [int(token), int(second)]


def _compare(half: Half, decoded: list[int] | None, alone: list[int] | None) -> None:
    mine = torch.tensor(alone if half.reads else decoded, device=half.own.device)
    both = half.everyone.all_gather(mine[None], [1, 1], "tokens").tolist()
    if both[0] != both[1]:
        raise RuntimeError(f"the decode rank comes to the tokens {both[1]}; one engine to {both[0]}")


def _meet(half: Half) -> None:
    """Both ranks are here, and what was launched has ended."""
    half.everyone.all_reduce(torch.zeros(1, device=half.own.device), "start")
    if half.own.device.type == "cuda":
        torch.cuda.synchronize()


def rows_of(
    subject: RankSubject, tokens: int, readings: list[dict[str, list[float]]], backend: str, value_bytes: int
) -> list[dict[str, Any]]:
    """Result rows: of each reading the slower rank."""
    slow = {name: [max(each) for each in zip(*(r[name] for r in readings), strict=True)] for name in readings[0]}
    middle = {name: sorted(raw)[len(raw) // 2] for name, raw in slow.items()}
    size = handover_bytes(subject.config, tokens, value_bytes)
    hidden = 1 - (middle["together"] - middle["prefill"]) / middle["hand-over"]
    facts = subject.conditions | {"tokens": tokens, "batch": 1, "prefill_plan": str(PAIR.prefill),
                                  "decode_plan": str(PAIR.decode), "ranks": backend, "bytes": size}

    def row(case: str, metric: str, raw: list[float], unit: str, **more: Any) -> dict[str, Any]:
        bound, peer = more.pop("bound", None), more.pop("peer", None)
        return make_row("disaggregation", case, subject.backend, metric, raw, unit, bound=bound, peer=peer,
                        **facts, **more)

    link = H200.link_bytes_per_second / 1e9 if backend == "nccl" else None
    return [
        row("hand-over of one prompt, layer by layer, alone", "gb_per_s", [size / t / 1e9 for t in slow["hand-over"]],
            "GB/s", bound=link),
        row("prefill of the hand-over's prompt, alone", "seconds", slow["prefill"], "s"),
        row("prefill and hand-over together, layer by layer", "seconds", slow["together"], "s",
            peer=("one after the other", middle["prefill"] + middle["hand-over"]), hidden_share=round(hidden, 4)),
        row("time to the first decoded token, handed over", "seconds", slow["first token"], "s",
            peer=("one engine", middle["one engine"])),
        row("time to the first decoded token, one engine", "seconds", slow["one engine"], "s"),
    ]


def run(
    out: Path | None, config: ModelConfig, tokens: tuple[int, ...] = (8192,), *, repetitions: int = 5,
    checkpoint: Path | None = None, small: bool = False, timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """Start two ranks and measure prompts of `tokens` tokens; each prompt's rows are written at once.

    small: dense weights, for CPU ranks. checkpoint: its weights (default: made on the device). RankError, which names
    the rank, if one fails; what was written stays.
    """
    forms = ("dense", "dense") if small else ("fp8", "fp8")
    subject, every = RankSubject(config, Plan(), forms[0], checkpoint, forms[1]), []
    with Ranks(2, timeout=300) as ranks:
        value_bytes = 2 if ranks.backend == "nccl" else 4
        ranks.run(prepare, subject, timeout=timeout)
        for count in tokens:
            readings = ranks.run(measure, count, repetitions, timeout=timeout)
            new = rows_of(subject, count, readings, ranks.backend, value_bytes)
            print("\n".join(map(text, new)), flush=True)
            every += new
            if out is not None:
                write_rows(out, new)
    return every


def text(row: dict[str, Any]) -> str:
    """A row for people."""
    of = row["conditions"]
    beside = f"  {row['peer']['name']} {row['peer']['value']:.4g}" if row["peer"] else ""
    hidden = f"  hidden {of['hidden_share']:.0%}" if "hidden_share" in of else ""
    return f"{of['model']:13} {of['tokens']:>6}  {row['case']:50} {row['value']:.4g} {row['unit']}{beside}{hidden}"
