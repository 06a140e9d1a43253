"""The routing kernel itself on the CPU, in Triton's interpreter, against the reference and a plain sort.

Triton decides at import whether it compiles or interprets, so `run` starts a fresh Python with TRITON_INTERPRET=1 that
computes the cases below and prints them as JSON.

    python -m gptoss_lab.viz.moe_interpreter              (with TRITON_INTERPRET=1)
"""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gptoss_kernels.reference.moe import route as reference_route
from gptoss_lab.viz.moe_rows import place
from gptoss_lab.viz.table import Table, table

LOGITS = (3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0)
TIED = (1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0)
BATCHES = (5, 20, 150)      # one for each of the kernel's forms: up to 8 tokens, up to 128, more


class InterpreterFailed(RuntimeError):
    """The process did not end well; the message is the last line it said."""


def obstacle() -> str | None:
    """Why the kernel cannot be interpreted here, or None."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def run(timeout: float = 120) -> list[dict[str, Any]]:
    """Every case of `measure`, computed by a fresh process with the interpreter. InterpreterFailed if that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "gptoss_lab.viz.moe_interpreter"], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise InterpreterFailed(f"the interpreter's process ended with {done.returncode}: {said[-1]}")
    return json.loads(done.stdout)


def show(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The cases as a table."""
    return table([[r["case"], r["shown"], f"{r['error']:.0e}", "yes" if r["placed"] else "no"] for r in rows],
                 ["routing kernel, interpreted", "ids and weights of token 0", "largest weight error",
                  "ids and rows as the reference's"])


def measure() -> list[dict[str, Any]]:
    """The example's logits in both orders, ties, and a random batch for each form. Needs TRITON_INTERPRET=1."""
    rows = [_case(f"softmax {how} the selection", torch.tensor([LOGITS]), how) for how in ("after", "before")]
    rows.append(_case("five equal logits", torch.tensor([TIED]), "after"))
    g = torch.Generator().manual_seed(7)
    return rows + [_case(f"{t} random tokens, 16 experts", torch.randn(t, 16, generator=g), "after") for t in BATCHES]


def _case(name: str, logits: torch.Tensor, softmax: str) -> dict[str, Any]:
    """Route logits [T, E] through the kernel: x holds them, the router is the identity."""
    from gptoss_kernels.moe import route

    experts = logits.shape[1]
    ours = route(logits.contiguous(), torch.eye(experts), torch.zeros(experts), softmax=softmax, align=16)
    ids, weights = reference_route(logits, 4, softmax=softmax)
    placed = place(ids, experts, 16)
    total = placed.layout.total
    pairs = ((ours.ids, ids), (ours.row_of, placed.row_of), (ours.token_of[:total], placed.token_of))
    same = all(torch.equal(a.long(), b) for a, b in pairs) and bool((ours.token_of[total:] == -1).all())
    shown = ", ".join(f"{e}: {w:.6f}" for e, w in zip(ours.ids[0].tolist(), ours.weights[0].tolist(), strict=True))
    return {"case": name, "shown": shown, "error": (ours.weights - weights).abs().max().item(), "placed": same}


if __name__ == "__main__":
    print(json.dumps(measure()))
