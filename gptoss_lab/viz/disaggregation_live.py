"""A hand-over between two real processes: one reads the prompts, the other writes the answers, gloo in between.

The checkpoint is the small one of `parallel_live`, so that it takes seconds. What arrives at the decode process is put
down as it arrives, and its own tokens are compared with those of one engine by whoever calls. `without` leaves rows of
what was sent at zero, to see that the answer needs them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.disaggregation import Disaggregated
from gptoss_lab.engine.disaggregation_routes import Pair, handover_bytes
from gptoss_lab.engine.ranks import merged
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, Ranks
from gptoss_lab.viz.parallel_live import small_config
from gptoss_lab.viz.table import Table, table

CHUNK, PAGE = 16, 4
PAIR = Pair(Plan(), Plan())
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, stop_ids=())


@dataclass(frozen=True)
class Arrived:
    """One message at the decode process. what: "pages", "window" or "first token". rows: positions in it."""

    what: str
    rows: int
    size: int


@dataclass(frozen=True)
class HandedOver:
    """tokens: of each prompt. arrived: the messages, in order."""

    tokens: list[tuple[int, ...]]
    arrived: list[Arrived]

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return sum(one.size for one in self.arrived if one.what != "first token")


def one_rank(ranks: Any, path: Path, prompts: Sequence[Sequence[int]], without: str = "") -> Any:
    """One process's work: rank 0 reads, rank 1 writes, in pages and a ring of its own. fp32."""
    engine = Disaggregated(ranks, path, PAIR, dtype=torch.float32, chunk=CHUNK, page_size=PAGE, pages=128)
    arrived, receive = [], engine.everyone.receive

    def noted(out: torch.Tensor, source: int, what: str) -> torch.Tensor:
        found = receive(out, source, what)
        arrived.append(Arrived(what, 1 if out.dim() == 1 else out.shape[1], out.numel() * out.element_size()))
        return found.zero_() if what == without else found

    engine.everyone.receive = noted
    return engine.complete(prompts, GREEDY), arrived


def hand_over(path: Path, prompts: Sequence[Sequence[int]], without: Sequence[str] = ("",)) -> list[HandedOver]:
    """Two processes over gloo; one hand-over of all prompts for each entry of `without`: "", "pages" or "window"."""
    found = []
    with Ranks(PAIR.world, "gloo", timeout=60) as ranks:
        for what in without:
            results = ranks.run(one_rank, path, prompts, what)
            tokens = [done.tokens for done in merged([own for own, _ in results])]
            found.append(HandedOver(tokens, results[1][1]))
    return found


def alone(path: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The tokens of one engine."""
    return [done.tokens for done in Engine(load_model(path, dtype=torch.float32)).complete(prompts, GREEDY)]


def wanted_bytes(lengths: Sequence[int]) -> int:
    """What the formula says that prompts of these lengths send, in fp32."""
    return sum(handover_bytes(small_config(), length, value_bytes=4) for length in lengths)


def arrivals_table(handed: HandedOver, lengths: Sequence[int]) -> Table:
    """One line per kind of message: how many, rows, bytes, and the bytes that the formula wants."""
    lines = []
    for what in ("pages", "window", "first token"):
        own = [one for one in handed.arrived if one.what == what]
        lines.append([what, len(own), sum(one.rows for one in own), sum(one.size for one in own), "live"])
    lines.append(["keys and values, by the formula", "", "", wanted_bytes(lengths), "modelled"])
    return table(lines, ["message", "how many", "rows", "bytes", "origin"])
