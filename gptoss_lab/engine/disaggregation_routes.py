"""Who sends which heads of which rows to whom when a prompt goes from its prefill ranks to its decode ranks.

Two plans cut the same key/value heads differently, or hold them several times over. Each decode rank must get each of
its heads once; a sender must hold it; and where several do, the load is spread. Both sides work this out for
themselves from the two plans, so nothing about it is sent.

A full layer's rows go in runs of whole pages as soon as a chunk of the prompt has been read, while the next one is
computed; what is left follows at the end. A sliding layer's go at the end, and only the last window - 1 of them: later
tokens see no others.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.config import ModelConfig
from gptoss_lab.parallel.errors import PlanError
from gptoss_lab.parallel.plan import Plan, check
from gptoss_lab.parallel.share import shares


@dataclass(frozen=True)
class Route:
    """heads start..stop-1 go from rank `sender` to rank `receiver`, numbers in the world of both engines."""

    sender: int
    receiver: int
    heads: range


@dataclass(frozen=True)
class Pair:
    """A prefill engine on the first ranks and a decode engine on those behind them, each with its own plan."""

    prefill: Plan
    decode: Plan

    @property
    def world(self) -> int:
        """Ranks of both."""
        return self.prefill.world + self.decode.world

    def routes(self, config: ModelConfig, sequence: int) -> list[Route]:
        """The routes of one sequence, by receiver and head. PlanError if a plan cannot cut the model."""
        from_ranks = self._group(config, self.prefill, sequence, 0)
        to_ranks = self._group(config, self.decode, sequence, self.prefill.world)
        found = []
        for position, (receiver, wanted) in enumerate(to_ranks):
            senders = [self._sender(from_ranks, head, position, n, len(wanted)) for n, head in enumerate(wanted)]
            start = 0
            for n in range(1, len(wanted) + 1):
                if n == len(wanted) or senders[n] != senders[start]:
                    found.append(Route(senders[start], receiver, wanted[start:n]))
                    start = n
        return found

    def first_token(self, config: ModelConfig, sequence: int) -> tuple[int, list[int]]:
        """The rank that tells the first token of a sequence, and those that must know it."""
        prefill = self._group(config, self.prefill, sequence, 0)
        return prefill[0][0], [rank for rank, _ in self._group(config, self.decode, sequence, self.prefill.world)]

    def _group(self, config: ModelConfig, plan: Plan, sequence: int, first: int) -> list[tuple[int, range]]:
        """(rank, its key/value heads) of the data-parallel group that serves a sequence."""
        start = (sequence % plan.dp) * plan.tp
        held = shares(config, check(config, plan))[start : start + plan.tp]
        return [(first + start + n, share.kv_heads) for n, share in enumerate(held)]

    @staticmethod
    def _sender(from_ranks: list[tuple[int, range]], head: int, position: int, number: int, count: int) -> int:
        """Of the ranks that hold a head, one: others for other receivers, and for other parts of a receiver's heads."""
        holders = [rank for rank, heads in from_ranks if head in heads]
        if not holders:
            raise PlanError(f"no prefill rank holds key/value head {head}")
        return holders[(position + number * len(holders) // count) % len(holders)]


def page_runs(length: int, chunk: int, page_size: int) -> list[tuple[int, int, int]]:
    """(tokens read, start, stop): after so many tokens of a prompt, rows start..stop-1 of the full layers can go.

    Runs end at page borders except the last, which ends with the prompt. ValueError for a number below 1.
    """
    if min(length, chunk, page_size) < 1:
        raise ValueError(f"length {length}, chunk {chunk}, page_size {page_size}; each must be at least 1")
    runs, sent = [], 0
    for read in [*range(chunk, length, chunk), length]:
        ready = length if read == length else read // page_size * page_size
        if ready > sent:
            runs.append((read, sent, ready))
            sent = ready
    return runs


def handover_bytes(config: ModelConfig, length: int, value_bytes: int = 2) -> int:
    """Bytes of keys and values of a prompt that must move, all heads and layers together."""
    row = 2 * config.kv_size * value_bytes
    window = min(length, config.sliding_window - 1)
    return sum(window if config.is_sliding(n) else length for n in range(config.num_layers)) * row
