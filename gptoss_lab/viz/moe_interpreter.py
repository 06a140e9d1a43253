"""The routing kernel itself on the CPU, in Triton's interpreter, against the reference and a plain sort.

`run` starts a fresh Python that computes the cases below (see interpreter.py):

    python -m gptoss_lab.viz.moe_interpreter              (with TRITON_INTERPRET=1)
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gptoss_kernels.reference.moe import route as reference_route
from gptoss_lab.viz.interpreter import run_module
from gptoss_lab.viz.moe_rows import place
from gptoss_lab.viz.table import Table, table

LOGITS = (3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0)
TIED = (1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0)
BATCHES = (5, 20, 150)      # one for each of the kernel's forms: up to 8 tokens, up to 128, more


def run(timeout: float = 120) -> list[dict[str, Any]]:
    """Every case of `measure`, computed by a fresh process with the interpreter. InterpreterFailed if that fails."""
    return run_module("gptoss_lab.viz.moe_interpreter", timeout)


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
