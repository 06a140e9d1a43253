"""Prefill and decode on different ranks: one engine reads prompts, another writes answers, keys and values in between.

The two halves of serving want different machines: prefill is arithmetic and likes long steps, decode is bytes and likes
large batches, and a prompt that is read between two decode steps makes everyone wait. So each half has its own group
of ranks with its own plan. A prefill rank sends the rows of full layers page by page while it reads on, then the
windows of the sliding layers and the first token; the decode ranks put the rows into caches of their own and go on
from there. Both halves must come to the tokens that one engine would.

Runs over any group of `gptoss_lab.parallel` that can send: gloo between CPU processes, NCCL between GPUs, threads in
tests. What is lost: the decode ranks take all prompts before their first step. A server would admit each as it comes.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.engine.disaggregation_routes import Pair, Route, page_runs
from gptoss_lab.engine.engine import DEFAULT, Completion
from gptoss_lab.engine.errors import SamplingError
from gptoss_lab.engine.ranks import RankEngine, load_share
from gptoss_lab.engine.request import Event, NewToken, Request
from gptoss_lab.engine.sampling import SamplingParams
from gptoss_lab.model.paged import PagedCache, PagePool
from gptoss_lab.parallel.groups import Group


class Disaggregated:
    """One rank of a prefill and a decode engine.

    own: this rank among `pair.world` ranks (`TorchRanks`, or a simulated one); all of them make one. path: checkpoint.
    chunk: tokens that a prefill step reads at most. page_size: rows that travel together at least. pages: keep the
    caches in a pool of so many pages (and 64 sequences); None for caches that grow. options: as for `load_share`.
    """

    def __init__(
        self, own: Any, path: str | Path, pair: Pair, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16, *, chunk: int = 8192, page_size: int = 64,
        pages: int | None = None, **options: Any,
    ) -> None:
        prefill = own.plan_groups(pair.prefill, 0)
        decode = own.plan_groups(pair.decode, pair.prefill.world)
        self.everyone: Group = own.group(range(pair.world))
        self.pair, self.rank, self.reads = pair, own.rank, prefill is not None
        self.chunk, self.page_size = chunk, page_size
        model = load_share(path, prefill if self.reads else decode, device, dtype, **options)
        self.config = model.config
        pool = None if pages is None else PagePool(
            self.config, pages=pages, rings=65, page_size=page_size, dtype=dtype, device=device,
            kv_heads=len(model.share.kv_heads),
        )
        self.engine = RankEngine(model, chunk, pool)

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] = DEFAULT
    ) -> dict[int, Completion]:
        """Number -> completion of the prompts of this rank's decode group; nothing on a prefill rank.

        prompts, sampling: the same on every rank. SamplingError also for top_logprobs, which do not travel.
        """
        requests = self.engine.requests(prompts, sampling)
        if any(request.params.top_logprobs for request in requests):
            raise SamplingError("top_logprobs is set; the likeliest tokens of the first position are not handed over")
        return self._read(requests) if self.reads else self._write(requests)

    # -- the prefill side -------------------------------------------------------------------------------------------
    def _read(self, requests: list[Request]) -> dict[int, Completion]:
        """Read the prompts one after the other, each handed over while and after it is read."""
        waiting = list(requests)
        while self.engine.anyone(bool(waiting)):
            if not waiting:
                self.engine.idle()
                continue
            handover = _Outgoing(self, waiting.pop(0))
            first = self._step(handover)
            while first is None:
                self.engine.anyone(True)
                first = self._step(handover)
            handover.finish(first)
        return {}

    def _step(self, handover: _Outgoing) -> NewToken | None:
        """One chunk of a prompt; its first token when that was the last chunk."""
        found = self.engine.decoder.step([handover.request])[0]
        handover.send_pages(len(handover.request.tokens) if found else self.engine.decoder.seen(handover.request))
        return found[0] if found else None

    # -- the decode side --------------------------------------------------------------------------------------------
    def _write(self, requests: list[Request]) -> dict[int, Completion]:
        """Take over the prompts in their order, then write all answers as one batch."""
        events: dict[int, list[Event]] = {}
        for request in requests:
            first = self._take_over(request)
            events[request.index] = [request.take(first)]
        unfinished = [request for request in requests if events[request.index][-1].finish is None]
        return self.engine.run(unfinished, events)

    def _take_over(self, request: Request) -> NewToken:
        """Fill a new cache of `request` with what its prefill ranks send; returns its first token."""
        self.engine.decoder.start(request)
        cache, length = request.state.caches[0], len(request.tokens)
        heads = self.engine.model.share.kv_heads
        routes = [r for r in self.pair.routes(self.config, request.index) if r.receiver == self.rank]
        rows = {n: self._empty(min(length, self._kept(n, length)), len(heads)) for n in range(self.config.num_layers)}
        for what, layer, start, stop in transfers(self.config, length, self.chunk, self.page_size):
            for route in routes:
                part = self._empty(stop - start, len(route.heads))
                self.everyone.receive(part, route.sender, what)
                at = slice(route.heads.start - heads.start, route.heads.stop - heads.start)
                offset = length - rows[layer].shape[1]
                rows[layer][:, start - offset : stop - offset, at] = part
        for layer, (keys, values) in rows.items():
            _restore(cache, layer, keys, values, length)
        cache.commit(length)
        told = torch.empty(2, dtype=torch.float64, device=self.engine.model.device)
        token, logprob = self.everyone.receive(
            told, self.pair.first_token(self.config, request.index)[0], "first token").tolist()
        return NewToken(int(token), logprob if request.params.logprobs else None)

    def _empty(self, rows: int, heads: int) -> torch.Tensor:
        """[2, rows, heads, D] for keys and values."""
        model = self.engine.model
        return torch.empty(2, rows, heads, self.config.head_dim, dtype=model.dtype, device=model.device)

    def _kept(self, layer: int, length: int) -> int:
        return self.config.sliding_window - 1 if self.config.is_sliding(layer) else length


class _Outgoing:
    """A prompt on its way: what of it has been sent, and what must have gone before its cache may be dropped."""

    def __init__(self, engine: Disaggregated, request: Request) -> None:
        self.engine, self.request = engine, request
        engine.engine.decoder.start(request)
        self._left = list(transfers(engine.config, len(request.tokens), engine.chunk, engine.page_size))
        runs = page_runs(len(request.tokens), engine.chunk, engine.page_size)
        self._ready = {(start, stop): read for read, start, stop in runs}
        self._routes = [r for r in engine.pair.routes(engine.config, request.index) if r.sender == engine.rank]
        self._pending: list[Callable[[], None]] = []
        self._length = len(request.tokens)

    def send_pages(self, read: int) -> None:
        """Start sending everything that is complete once `read` tokens are in the cache."""
        while self._left and self._ready.get(self._left[0][2:], self._length) <= read:
            what, layer, start, stop = self._left.pop(0)
            if self._routes:
                keys, values = stored_rows(self.request.state.caches[0], layer, self.engine.engine.model)
                offset = read - keys.shape[0]
                at = slice(start - offset, stop - offset)
                for route in self._routes:
                    self._send(route, what, keys[at], values[at])

    def finish(self, first: NewToken) -> None:
        """Tell the first token, and wait until everything has gone."""
        source, targets = self.engine.pair.first_token(self.engine.config, self.request.index)
        if source == self.engine.rank:
            logprob = float("nan") if first.logprob is None else first.logprob
            told = torch.tensor([first.token, logprob], dtype=torch.float64, device=self.engine.engine.model.device)
            self._pending += [self.engine.everyone.send(told, rank, "first token") for rank in targets]
        for wait in self._pending:
            wait()
        self.engine.engine.decoder.stop(self.request)

    def _send(self, route: Route, what: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        first = self.engine.engine.model.share.kv_heads.start
        at = slice(route.heads.start - first, route.heads.stop - first)
        self._pending.append(self.engine.everyone.send(torch.stack([keys[:, at], values[:, at]]), route.receiver, what))


def transfers(config: Any, length: int, chunk: int, page_size: int) -> list[tuple[str, int, int, int]]:
    """(name, layer, start, stop) of every piece of a prompt's keys and values, in the order in which both sides go."""
    full = [n for n in range(config.num_layers) if not config.is_sliding(n)]
    sliding = [n for n in range(config.num_layers) if config.is_sliding(n)]
    pieces = [("pages", n, start, stop) for _, start, stop in page_runs(length, chunk, page_size) for n in full]
    window = (max(0, length - config.sliding_window + 1), length)
    return pieces + [("window", n, *window) for n in sliding if window[0] < window[1]]


def stored_rows(cache: Any, layer: int, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows that a cache holds of a layer, [rows, Hkv, D]: all positions, or the window of a sliding layer."""
    config = model.config
    heads = model.layers[layer].attention.split[1]
    nothing = torch.empty(0, heads, config.head_dim, dtype=model.dtype, device=model.device)
    return cache.layers[layer].extend(nothing, nothing)


def _restore(cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Give an empty cache the last rows of a layer. A ring wants all positions; those before the window are zeros."""
    missing = length - keys.shape[0]
    if missing and isinstance(cache, PagedCache):
        keys, values = (torch.cat([rows.new_zeros(missing, *rows.shape[1:]), rows]) for rows in (keys, values))
    cache.layers[layer].extend(keys, values)
