"""Captured decode steps: which size a batch takes, what its spare rows may touch, and what replaying saves.

The check runs the library's own captured step (`gptoss_lab.model.fast`) for fewer requests than it has rows, twice, the
second time for other requests. Without a GPU nothing is captured, but the same buffers are filled and the same function
runs on them, so what spare rows could spoil they could spoil here too.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.model.fast.graphs import SIZES
from gptoss_lab.model.load import Source
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table


def size_for(requests: int, sizes: Sequence[int] = SIZES) -> int:
    """The smallest captured size with a row for each of so many requests. ValueError if there is none."""
    fitting = [size for size in sizes if size >= requests]
    if not fitting or requests < 1:
        raise ValueError(f"requests is {requests}; 1 to {max(sizes)} are expected")
    return min(fitting)


def sizes_figure(sizes: Sequence[int] = SIZES) -> go.Figure:
    """Rows that are computed against rows that are wanted."""
    wanted = list(range(1, max(sizes) + 1))
    taken = [size_for(n, sizes) for n in wanted]
    fig = go.Figure()
    fig.add_scatter(x=wanted, y=taken, mode="lines", line={"shape": "hv", "color": style.BLUE}, name="rows replayed")
    fig.add_scatter(x=wanted, y=wanted, mode="lines", line={"dash": "dot", "color": style.GREY}, name="rows wanted")
    fig.update_xaxes(title_text="requests in decode")
    fig.update_yaxes(title_text="rows of the step")
    spare = sum(taken) / sum(wanted) - 1
    return style.finish(fig, f"{len(sizes)} captured sizes serve every batch up to {max(sizes)}; "
                             f"they compute {spare:.0%} more rows than wanted", "modelled",
                        "every number of requests counted once")


@torch.inference_mode()
def spare_rows_check(source: Source, device: torch.device | str, requests: int = 5, size: int = 8) -> list[float]:
    """Largest difference of the logits, replayed at `size` rows against launched for `requests` rows alone, over their
    largest value: for some requests, then for others through the same captured step. fp32."""
    weights = lay_out(source, device, torch.float32, experts="dense")
    pool = make_pool(weights, tokens=256 * requests, sequences=2 * requests)
    replayed = FastTransformer(weights, pool, sizes=(size,), max_kv_len=256)
    launched = FastTransformer(weights, pool, graphs=False, max_kv_len=256)
    differences = []
    for turn in range(2):
        prompts = [[(97 * turn + 31 * n + 7 * i) % weights.config.vocab_size for i in range(3 + 9 * n)]
                   for n in range(requests)]
        got = [_decode(model, prompts) for model in (replayed, launched)]
        differences.append(((got[0] - got[1]).abs().max() / got[1].abs().max()).item())
    return differences


def _decode(model: FastTransformer, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [B, V] of one decode step after the prompts; the caches are given back."""
    caches = [model.new_cache() for _ in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    first = model(ids, [len(prompt) for prompt in prompts], caches).argmax(dim=-1)
    logits = model(first, [1] * len(prompts), caches)
    for cache in caches:
        cache.release()
    return logits


def recorded_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Recorded decode steps: launched one by one, replayed by the engine, and the bare replay. ms, MB."""
    lines = []
    for row in rows:
        about = row["conditions"]
        if row["suite"] != "decode" or row["value"] is None or "eager_ms" not in about:
            continue
        lines.append([about["model"], row["backend"], f"{about['batch']} at {about['tokens']:,}",
                      f"{about['eager_ms']:.2f}", f"{row['value']:.2f}", f"{about['replay_ms']:.2f}",
                      f"{about['capture_seconds']:.1f}", f"{about['capture_bytes'] / 1e6:.0f}", "recorded"])
    columns = ["model", "backend", "batch", "launched, ms", "replayed, ms", "GPU alone, ms", "capture, s",
               "capture, MB", "origin"]
    return table(lines or [["not recorded yet", *[""] * (len(columns) - 1)]], columns)
