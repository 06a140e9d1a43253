"""The end of a sharded layer, timed: all-reduce of [rows, H] bf16, residual add, RMSNorm. And KV from GPU to GPU.

On GPUs each form is captured as a CUDA graph of several calls, as an engine runs it, and the graphs are replayed in
turn: our kernel in both forms, the part lying where the layer before wrote it for the peers ("in place") or in ordinary
memory, out of which the kernel copies it first; NCCL with add and norm behind it, and NCCL's all-reduce alone. All are
first compared with the plain sum of all ranks' parts. For many rows also the sum in which each rank adds rows of its
own and hands out their norm in e4m3: it brings fewer bytes, and what follows need not norm and quantise. On CPU ranks
gloo's plain form is timed, which says nothing about NVLink but runs every line that is not a kernel.
Bound: 2 (p - 1) / p of the bytes over one direction of NVLink (450 GB/s).

    gptoss-lab bench comm --ranks 2
    torchrun --nproc-per-node 2 -m gptoss_lab.bench.comm --out results/comm.jsonl
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gptoss_kernels.comm import all_reduce_norm
from gptoss_kernels.graph import capturing
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import dequantise_groups
from gptoss_lab import results
from gptoss_lab.config import ModelConfig, preset
from gptoss_lab.cost.hardware import H200
from gptoss_lab.engine.disaggregation_routes import handover_bytes
from gptoss_lab.parallel import Ranks, TorchRanks, from_torchrun
from gptoss_lab.parallel.groups import Group
from gptoss_lab.parallel.torch_group import TorchGroup

if TYPE_CHECKING:
    from gptoss_kernels.comm import FusedAllReduce

OWN_ROWS = 1024                 # from so many rows on a prompt's steps take own rows
ROWS = (1, 8, 128, 32, 1024, 8192, 65536)
CALLS = 20                      # in one graph; even, since two buffers take turns
TARGETS = {1: 8.0, 8: 8.0, 128: 12.0}
HANDOVER_TARGET = 250.0         # GB/s, two GPUs
CASE = "all-reduce, residual, RMSNorm"


def measure(own: TorchRanks, rows: int, hidden: int, repetitions: int) -> dict[str, list[float]]:
    """Microseconds a call of every form on this rank, checked before. RuntimeError for a wrong result."""
    group = own.group(range(own.world))
    g = torch.Generator().manual_seed(own.rank)
    part = torch.randn(rows, hidden, generator=g).bfloat16().to(own.device)
    same = torch.Generator().manual_seed(1000)
    residual = torch.randn(rows, hidden, generator=same).bfloat16().to(own.device)
    weight = (1 + 0.2 * torch.randn(hidden, generator=same)).to(own.device)
    expected = all_reduce_norm(_everyone(group, part), residual, weight)
    forms = _forms(own, group, part, residual, weight)
    for name, form in forms.items():
        found = form()
        if found is not None:
            _compare(f"{name}, {rows} rows", found, expected)
    return _timed(forms, repetitions, own, group)


def _everyone(group: Group, part: torch.Tensor) -> list[torch.Tensor]:
    if group.size == 1:
        return [part]
    return list(group.all_gather(part, [len(part)] * group.size, "parts").split(len(part)))


def _forms(
    own: TorchRanks, group: Group, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor] | None]]:
    """Name -> one call. A call that returns nothing computes another thing (the all-reduce alone)."""
    backend = dist.get_backend()

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual + group.all_reduce(part, "combine")
        return summed, rms_norm(summed, weight)

    def alone() -> None:
        group.all_reduce(part, "combine")

    forms: dict[str, Callable[[], Any]] = {
        f"{backend}, add and norm apart": plain, f"{backend}, all-reduce alone": alone}
    if own.device.type == "cuda" and own.world > 1:
        from gptoss_kernels.comm import FusedAllReduce

        fused = FusedAllReduce(group.process_group, len(part), part.shape[1])

        for _ in range(2):                                              # both of the buffers that take turns
            fused.part(len(part)).copy_(part)
            fused(residual, None, part=fused.part(len(part)))

        def kernel(form: str, given: torch.Tensor | None) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
            def call() -> tuple[torch.Tensor, torch.Tensor]:
                return fused(residual, weight, form=form, part=given)
            return call

        forms = {f"triton {form}{where}": kernel(form, given) for form in ("one_shot", "two_shot")
                 for where, given in ((", in place", None), ("", part))} | forms
        if len(part) >= OWN_ROWS:
            forms["triton own rows in e4m3, in place"] = _own_rows(own, group, fused, residual, weight)
    return forms


def _own_rows(
    own: TorchRanks, group: TorchGroup, sums: FusedAllReduce, residual: torch.Tensor, weight: torch.Tensor
) -> Callable[[], None]:
    """A call of that form; checked here, once, since it gives other rows and another dtype. RuntimeError."""
    from gptoss_kernels.comm import FusedOwnRows, own_ranges

    tokens, fused = len(residual), FusedOwnRows(sums, group.process_group, 4)
    mine = own_ranges(tokens, own.world)[own.rank]
    kept = residual[mine.start : mine.stop].contiguous()
    summed, _ = sums(residual, None, part=sums.part(tokens))
    total, rows = fused(sums.part(tokens), kept, weight)
    if not torch.equal(total, summed[mine.start : mine.stop]):
        raise RuntimeError("own rows: the sum is another one than that of whole rows")
    normed = rms_norm(summed, weight).float()
    error = (dequantise_groups(rows.values[:tokens], rows.scale[:tokens]) - normed).norm() / normed.norm()
    if not error <= 0.04:
        raise RuntimeError(f"own rows: relative error of the norm in e4m3 is {error:.2e}; at most 0.04 is right")

    def call() -> None:
        fused(sums.part(tokens), kept, weight)

    return call


def _compare(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """RuntimeError unless sum and norm agree to two steps of bf16 (a plain form rounds the sum before the add)."""
    for what, ours, exact in zip(("sum", "norm"), found, expected, strict=True):
        error = ((ours.float() - exact.float()).norm() / exact.float().norm()).item()
        if not error <= 2**-7:
            raise RuntimeError(f"{name}: relative error of the {what} is {error:.2e}; at most {2**-7:.2e} is right")


def _timed(
    forms: Mapping[str, Callable[[], Any]], repetitions: int, own: TorchRanks, group: Group
) -> dict[str, list[float]]:
    if own.device.type != "cuda":
        found: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(repetitions):
            for name, form in forms.items():
                group.all_reduce(torch.zeros(1), "start")
                begin = time.perf_counter()
                for _ in range(CALLS):
                    form()
                found[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
        return found
    graphs = {name: _graph(form) for name, form in forms.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in forms}
    for reading in range(repetitions + 5):                       # the first five warm clocks and links
        for name, graph in graphs.items():
            group.all_reduce(torch.zeros(1, device=own.device), "start")
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if reading >= 5:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [1e3 * a.elapsed_time(b) / CALLS for a, b in pairs] for name, pairs in events.items()}


def _graph(form: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """CALLS calls captured; the caller keeps `form`, and with it the memory, alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            form()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(CALLS):
            form()
    return graph


def comm_rows(
    rows: int, hidden: int, world: int, readings: Sequence[Mapping[str, list[float]]], gpus: bool
) -> list[dict[str, Any]]:
    """Result rows of one number of rows: of each form the slowest rank, reading by reading. gpus: NVLink's bound holds.
    """
    slowest = {name: [max(each) for each in zip(*(r[name] for r in readings), strict=True)] for name in readings[0]}
    bound = 1e6 * 2 * (world - 1) / world * rows * hidden * 2 / H200.link_bytes_per_second
    plain = next(name for name in slowest if name.endswith("add and norm apart"))
    peer = (plain, sorted(slowest[plain])[len(slowest[plain]) // 2])
    target = {"target_us": TARGETS[rows]} if rows in TARGETS else {}
    return [
        results.make_row("comm", CASE, name, "microseconds", found, "us", bound=bound if world > 1 and gpus else None,
                         peer=None if name == plain else peer, ep=1, dp=1, tp=world, batch=1, tokens=rows,
                         hidden=hidden, calls_in_graph=CALLS if gpus else 0, **target)
        for name, found in slowest.items()
    ]


def hand_over(own: TorchRanks, config: ModelConfig, tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds in which rank 0 gives the keys and values of one prompt to rank 1, in each way, checked by values.

    All layers in one exchange of the process group; as one message, if they lie one behind the other; and on GPUs layer
    by layer by the copy engines into memory that both can address, which takes no multiprocessor.
    """
    group, backend = own.group(range(own.world)), dist.get_backend()
    layers = [min(tokens, config.sliding_window - 1) if config.is_sliding(n) else tokens
              for n in range(config.num_layers)]
    sizes = [2 * rows * config.num_kv_heads * config.head_dim for rows in layers]
    given = torch.cat([torch.full((size,), n + 1.0, dtype=torch.bfloat16) for n, size in enumerate(sizes)])
    given = given.to(own.device)
    to = torch.empty_like(given)
    ways = {f"{backend}, one exchange": (_exchange, to), f"{backend}, one message": (_message, to)}
    if own.device.type == "cuda":
        from gptoss_kernels.comm import SharedMemory

        shared = SharedMemory(group.process_group, tuple(given.shape), given.dtype)
        ways["copy engines"] = (partial(_copies, there=shared.of_ranks[1]), shared.own)
    seconds = {}
    for name, (way, into) in ways.items():
        into.zero_()
        seconds[name] = _handed_over(own, group, partial(way, group, sizes, given, into), repetitions)
        if own.rank == 1 and not torch.equal(into, given):
            raise RuntimeError(f"hand-over by {name}: other values arrived than were sent")
    return seconds


def _exchange(group: TorchGroup, sizes: Sequence[int], given: torch.Tensor, into: torch.Tensor) -> None:
    """All layers as messages of their own, given to the process group together."""
    if group.index > 1:
        return
    do, parts = (dist.isend, given) if group.index == 0 else (dist.irecv, into)
    for work in dist.batch_isend_irecv([dist.P2POp(do, part, group=group.process_group, group_peer=1 - group.index)
                                        for part in parts.split(sizes)]):
        work.wait()


def _message(group: Group, sizes: Sequence[int], given: torch.Tensor, into: torch.Tensor) -> None:
    if group.index == 0:
        group.send(given, 1, "pages")()
    elif group.index == 1:
        group.receive(into, 0, "pages")


def _copies(group: Group, sizes: Sequence[int], given: torch.Tensor, into: torch.Tensor, there: torch.Tensor) -> None:
    """there: the receiver's `into` as the sender addresses it."""
    if group.index == 0:
        for layer, place in zip(given.split(sizes), there.split(sizes), strict=True):
            place.copy_(layer)


def _handed_over(own: TorchRanks, group: Group, way: Callable[[], None], repetitions: int) -> list[float]:
    seconds = []
    for _ in range(repetitions + 2):
        _meet(own, group)
        begin = time.perf_counter()
        way()
        _meet(own, group)
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def _meet(own: TorchRanks, group: Group) -> None:
    group.all_reduce(torch.zeros(1, device=own.device), "start")
    if own.device.type == "cuda":
        torch.cuda.synchronize()


def handover_rows(
    config: ModelConfig, tokens: int, gpus: bool, readings: Sequence[Mapping[str, list[float]]]
) -> list[dict[str, Any]]:
    """A row for each way of a hand-over: GB/s by the slowest rank of each reading. gpus: NVLink's bound holds."""
    size, bound = handover_bytes(config, tokens), H200.link_bytes_per_second / 1e9 if gpus else None
    rates = {way: [size / max(each) / 1e9 for each in zip(*(r[way] for r in readings), strict=True)]
             for way in readings[0]}
    return [results.make_row("disaggregation", "keys and values of one prompt, alone", way, "gb_per_s", found, "GB/s",
                             bound=bound, model=config.name, tokens=tokens, batch=1, bytes=size, target=HANDOVER_TARGET)
            for way, found in rates.items()]


def run(
    out: Path | None, world: int = 2, rows: Sequence[int] = ROWS, repetitions: int = 20, model: str = "gpt-oss-120b",
    tokens: int = 8192,
) -> list[dict[str, Any]]:
    """Start `world` ranks, measure every number of rows and one hand-over; write each as it is measured."""
    config, every = preset(model), []
    with Ranks(world, timeout=120) as ranks:
        def keep(new: list[dict[str, Any]]) -> None:
            print("\n".join(map(line, new)), flush=True)
            every.extend(new)
            if out is not None:
                results.write_rows(out, new)

        for count in rows:
            readings = ranks.run(measure, count, config.hidden_size, repetitions)
            keep(comm_rows(count, config.hidden_size, world, readings, ranks.backend == "nccl"))
        if world > 1:
            keep(handover_rows(config, tokens, ranks.backend == "nccl", ranks.run(hand_over, config, tokens, 9)))
    return every


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    beside = f"{row['peer']['name']} {row['peer']['value']:.1f}" if row["peer"] else ""
    bound = "" if row["bound"] is None else f"bound {row['bound']:.3g}"
    return (f"{row['conditions']['tokens']:>6} rows  {row['backend']:32} {row['value']:10.2f} {row['unit']:5} "
            f"{bound:16} {beside}")


def main() -> None:
    """The command line under torchrun; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/comm.jsonl"))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--repetitions", type=int, default=20)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        run(given.out, rows=given.rows, repetitions=given.repetitions)
        return
    own, config = from_torchrun(), preset("gpt-oss-120b")
    for count in given.rows:
        readings: list[Any] = [None] * own.world
        dist.all_gather_object(readings, measure(own, count, config.hidden_size, given.repetitions))
        if own.rank == 0:
            new = comm_rows(count, config.hidden_size, own.world, readings, own.device.type == "cuda")
            print("\n".join(map(line, new)), flush=True)
            results.write_rows(given.out, new)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
