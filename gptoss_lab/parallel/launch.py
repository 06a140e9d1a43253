"""Starting ranks as processes of this machine, from a script, a test or a notebook cell.

    with Ranks(4) as ranks:                       # four processes; gloo, or NCCL with a GPU each
        results = ranks.run(function, argument)   # function(own, argument) in each; own is a TorchRanks
        print(ranks.logs())

`function` must be importable (a library function, not one of a notebook). The processes stay until the block ends, so
only the first run pays for starting them. What a rank prints goes to a file of its own.

When a rank raises or dies the others are ended within a second; when one does not come to an exchange, after `timeout`
seconds; when it computes for ever without the others waiting, after the deadline of `run`. In each case a RankError
names it, and no process is left. A rank whose parent has gone ends itself. Across nodes torchrun starts the ranks
(torch_ranks.py). Under NCCL an exchange returns before it has happened, so there a hang may show only when the process
group's own limit, four times `timeout`, ends a rank.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from gptoss_lab.parallel.errors import RankError
from gptoss_lab.parallel.torch_ranks import TorchRanks
from gptoss_lab.parallel.watch import Notes

_GRACE = 0.5            # seconds in which the death of a rank may follow the complaint of its neighbour


class Ranks:
    """`world` processes that wait for work.

    backend: "gloo" or "nccl"; None takes NCCL where torch sees a GPU for each. timeout: seconds that ranks wait for one
    that does not come to an exchange. start_timeout: seconds for all of them to be up. folder: for the logs (default:
    a temporary one, removed at the end).
    """

    def __init__(
        self, world: int, backend: str | None = None, timeout: float = 30.0, start_timeout: float = 120.0,
        folder: Path | None = None,
    ) -> None:
        if world < 1:
            raise RankError(f"a world of {world} ranks; at least 1 is expected")
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "gloo"
        self.world, self.backend, self.timeout = world, backend, timeout
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._temporary.name) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        context = _context(backend)
        self._notes = Notes(context, world)
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        rendezvous = f"file://{self._temporary.name}/rendezvous"
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, daemon=True, name=f"rank {rank}",
                    args=(rank, world, backend, rendezvous, theirs, self._notes, self.folder, 4 * timeout,
                          dict(os.environ)),
                )
                process.start()
                theirs.close()
                self._ends.append(ours)
                self.processes.append(process)
            self._collect("start", start_timeout)
        except BaseException:
            self._end()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
        """function(own, *arguments) on every rank; returns what each returned, by rank.

        timeout: seconds for all of it. RankError names the rank that raised, died or hung; the ranks are ended then.
        """
        if not self.processes:
            raise RankError("these ranks have been ended; start new ones")
        try:
            for end in self._ends:
                with contextlib.suppress(BrokenPipeError):
                    end.send_bytes(pickle.dumps((function, arguments)))
            return self._collect(getattr(function, "__name__", "work"), timeout)
        except BaseException:
            self._end()
            raise

    def logs(self) -> str:
        """What the ranks printed, line by line behind their numbers, rank after rank."""
        lines = []
        for rank in range(self.world):
            file = self.folder / f"rank{rank}.log"
            text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            lines += [f"[rank {rank}] {line}" for line in text.splitlines()]
        return "\n".join(lines)

    def close(self) -> None:
        """Let the ranks end, and end those that do not."""
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):
                end.send_bytes(b"")
        for process in self.processes:
            process.join(5)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- waiting for answers ----------------------------------------------------------------------------------------
    def _collect(self, what: str, timeout: float) -> list[Any]:
        results, open_ranks = [None] * self.world, set(range(self.world))
        deadline = time.monotonic() + timeout
        while open_ranks:
            ready = wait([self._ends[rank] for rank in open_ranks], timeout=0.1)
            for rank in [r for r in open_ranks if self._ends[r] in ready]:
                kind, value = self._receive(rank)
                if kind != "ok":
                    raise self._culprit(what, open_ranks, RankError(f"rank {rank} {value} in {what}", rank), kind)
                results[rank] = value
                open_ranks.discard(rank)
            self._check_waiting(open_ranks)
            if time.monotonic() > deadline:
                rank = min(open_ranks, key=self._notes.waited)
                raise RankError(f"rank {rank} did not finish {what} within {timeout:g} s; it "
                                f"{self._notes.where(rank)}", rank)
        return results

    def _receive(self, rank: int) -> tuple[str, Any]:
        """A rank's answer: ("ok", result), ("failed", why), or ("lost", why) where an exchange failed under it.

        A pipe that closes without an answer is a rank that died.
        """
        try:
            return pickle.loads(self._ends[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return "failed", f"ended with exit code {self.processes[rank].exitcode}"

    def _culprit(self, what: str, open_ranks: set[int], first: RankError, kind: str) -> RankError:
        """A rank whose exchange failed is rarely the one at fault: see whether another one died or raised by itself."""
        others = {self._ends[rank]: rank for rank in open_ranks if rank != first.rank}
        end = time.monotonic() + _GRACE
        while kind == "lost" and others and time.monotonic() < end:
            for ready in wait(list(others), timeout=0.1):
                rank = others.pop(ready)
                kind, value = self._receive(rank)
                if kind == "failed":
                    return RankError(f"rank {rank} {value} in {what}", rank)
                kind = "lost"
        return first

    def _check_waiting(self, open_ranks: set[int]) -> None:
        late = [rank for rank in open_ranks if self._notes.waited(rank) > self.timeout]
        if not late:
            return
        absent = [rank for rank in range(self.world) if not self._notes.waited(rank)]
        if absent:
            rank = min(absent, key=lambda r: self._notes.count[r])
            raise RankError(f"rank {rank} did not come: rank {late[0]} {self._notes.where(late[0])}, for more than "
                            f"{self.timeout:g} s; rank {rank} {self._notes.where(rank)}", rank)
        places = "; ".join(f"rank {rank} {self._notes.where(rank)}" for rank in range(self.world))
        behind = min(range(self.world), key=lambda r: self._notes.count[r])
        raise RankError(f"the ranks wait for each other, more than {self.timeout:g} s: {places}", behind)

    def _end(self) -> None:
        """End every process that still runs, politely and then not, and forget them."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join(3)
        for end in self._ends:
            end.close()
        self.processes, self._ends = [], []


def _context(backend: str) -> BaseContext:
    """How ranks are started: on CPUs as forks of a server that has imported torch once and has run nothing, which is a
    matter of milliseconds; on GPUs, where a model takes longer to load, as new interpreters.
    """
    if backend == "nccl" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# -- in the rank -------------------------------------------------------------------------------------------------------
def _rank_main(
    rank: int, world: int, backend: str, rendezvous: str, end: Connection, notes: Notes, folder: Path, timeout: float,
    environment: dict[str, str],
) -> None:
    """The life of a rank: join the others, then one task after the other until an empty message comes.

    environment: of whoever starts it; what torch reads when it is imported is that of the first ranks.
    """
    _redirect(folder / f"rank{rank}.log")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    torch.set_num_threads(max(1, torch.get_num_threads() // world))

    def answer(kind: str, value: Any) -> None:
        end.send_bytes(pickle.dumps((kind, value)))

    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world,
                                timeout=timedelta(seconds=timeout))
        own = TorchRanks(notes.watch(rank))
        answer("ok", None)
        while message := end.recv_bytes():
            function, arguments = pickle.loads(message)
            answer("ok", function(own, *arguments))
    except EOFError:
        os._exit(1)
    except BaseException as error:
        traceback.print_exc()
        # An exchange that failed leaves its note open: then another rank is probably at fault.
        answer("lost" if notes.waited(rank) else "failed", f"failed with {type(error).__name__}: {error}")
        os._exit(1)
    dist.destroy_process_group()


def _redirect(log: Path) -> None:
    """Everything that this process and the libraries in it print goes to `log`, unbuffered."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
