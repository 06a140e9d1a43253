"""The Triton kernels on the CPU, against fp64: small cases in a process of their own.

`run` starts a fresh Python that computes the cases below (see interpreter.py):

    python -m gptoss_lab.viz.attention_interpreter        (with TRITON_INTERPRET=1)

What is compared: the kernel's output with `sink_attention` in fp64. The example row (logits 1..4, values 10..40, sink
2, answer 32.126854) goes through every case too, in fp32.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gptoss_kernels.attention import LayerKind, PagedDecode, Prefill
from gptoss_kernels.reference.attention import sink_attention
from gptoss_lab.viz.attention_steps import LOGITS, SINK, VALUES
from gptoss_lab.viz.interpreter import run_module
from gptoss_lab.viz.table import Table, table

HEADS, KV_HEADS, HEAD_DIM, KEYS, PAGE = 8, 2, 64, 150, 16
FORMS = ("prefill", "decode")
ENTERS = {"with_sink": "before the first key", "without_sink": "after the last key"}
"""Where the kernel lets the sink in, by the LSE it is asked for (`SINK_FIRST` in the kernels)."""
WINDOWS = (None, 128)
LARGEST = 1e-6      # of the relative error in fp32


def run(timeout: float = 120) -> list[dict[str, Any]]:
    """Every case of `measure`, computed by a fresh process with the interpreter. InterpreterFailed if that fails."""
    return run_module("gptoss_lab.viz.attention_interpreter", timeout)


def show(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The cases as a table: what ran, the example row's output, the error against fp64."""
    return table(
        [[r["form"], r["layer"], r["splits"], r["enters"], f"{r['example']:.6f}", f"{r['error']:.1e}"] for r in rows],
        ["form", "layer", "splits", "sink enters", "example row", f"relative error, {KEYS} keys"],
    )


def measure() -> list[dict[str, Any]]:
    """The cases: prefill and decode, full and sliding, sink at the start and at the end. Needs TRITON_INTERPRET=1."""
    rows = []
    for form in FORMS:
        for window in WINDOWS:
            for lse, enters in ENTERS.items():
                error, splits = _random_case(form, window, lse)
                rows.append({
                    "form": form, "layer": "full" if window is None else f"window {window}", "splits": splits,
                    "enters": enters, "example": _example(form, window, lse), "error": error,
                })
    return rows


def _random_case(form: str, window: int | None, lse: str) -> tuple[float, int]:
    """Norm of the error over the norm of the fp64 output, and in how many splits the keys were walked."""
    g = torch.Generator().manual_seed(5)
    queries = KEYS if form == "prefill" else 1
    q, k, v = (torch.randn(n, h, HEAD_DIM, generator=g)
               for n, h in ((queries, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS)))
    sinks = 2 * torch.randn(HEADS, generator=g)
    layer = LayerKind(HEADS, KV_HEADS, HEAD_DIM, torch.float32, window)
    out, splits = _attend(form, layer, q, k, v, sinks, lse)
    exact, _ = sink_attention(q.double(), k.double(), v.double(), sinks, cu_seqlens_q=[0, queries],
                              cu_seqlens_k=[0, KEYS], window=window)
    return float((out.double() - exact).norm() / exact.norm()), splits


def _example(form: str, window: int | None, lse: str) -> float:
    """The example row through the kernel: q = 1, k_j = logit / D, so that q.k is the logit; scale 1."""
    d = 16
    k, v = (torch.tensor(x).view(-1, 1, 1).repeat(1, 1, d) for x in (LOGITS, VALUES))
    layer = LayerKind(1, 1, d, torch.float32, window, scale=1.0)
    return float(_attend(form, layer, torch.ones(1, 1, d), k / d, v, torch.tensor([SINK]), lse)[0][0, 0, 0])


def _attend(
    form: str, layer: LayerKind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, lse: str
) -> tuple[torch.Tensor, int]:
    """out [Tq, Hq, D] from the Triton backend, and its number of splits."""
    keys = k.shape[0]
    if form == "prefill":
        plan = Prefill(layer, [0, q.shape[0]], [0, keys], device="cpu", lse=lse, backend="triton")
        return plan.run(q, k, v, sinks)[0], 1
    pages = -(-keys // PAGE)
    padded = [torch.cat([x, torch.zeros(pages * PAGE - keys, *x.shape[1:])]).view(pages, PAGE, *x.shape[1:])
              for x in (k, v)]
    plan = PagedDecode(layer, batch=1, max_kv_len=keys, page_size=PAGE, device="cpu", lse=lse, backend="triton")
    plan.step(torch.tensor([keys], dtype=torch.int32), torch.arange(pages, dtype=torch.int32)[None])
    return plan.run(q, *padded, sinks)[0], _splits(layer, pages * PAGE)


def _splits(layer: LayerKind, keys: int) -> int:
    """How many splits the decode kernel cuts this many keys into, for one sequence."""
    from gptoss_kernels.attention.triton_backend import DECODE_PROGRAMS, decode_config
    from gptoss_kernels.attention.triton_decode import split_count

    blocks = 1 if layer.window is not None else -(-keys // decode_config(layer)["BLOCK_N"])
    return split_count(1, layer.num_kv_heads, blocks, DECODE_PROGRAMS)


if __name__ == "__main__":
    print(json.dumps(measure()))
