"""A checkpoint as a model that an engine can run: the fast one where its kernels run best, the plain one elsewhere.

What: `open_model` chooses, loads, and says in one line what it chose and why. The fast model comes with a pool of pages
for its caches, as large as what was asked for or as memory allows; the plain one with caches that grow, unless whoever
opened it makes a pool.

How large: on a GPU the weights are laid out first. Then a trial on a small pool shows what work takes beside weights
and pages: a chunk of a prompt, a later chunk of it, and the largest captured step of decode (graphs share their memory,
so the largest is all they take). What then is really free, less that and a little, becomes pages.

Why experts are kept as the checkpoint has them: MXFP4 and FP8 both have kernels, and nothing is rounded again; which to
serve is chosen by converting. What is lost: the trial compiles and captures once more than needed, some seconds.
"""
from __future__ import annotations

import gc
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gptoss_lab.checkpoint import Fp8, Mxfp4, fp8, open_checkpoint
from gptoss_lab.config import ModelConfig
from gptoss_lab.engine.memory import positions_in
from gptoss_lab.model import Transformer, load_model
from gptoss_lab.model.load import DENSE_LIMIT, Source

if TYPE_CHECKING:
    from gptoss_lab.model.fast import FastTransformer, FastWeights

FORWARDS = ("auto", "plain", "fast")
STEP_TOKENS = 2048
"""New tokens that go through the fast model at once unless told otherwise; what work takes is tried with so many."""
SHARE = 0.95
"""Of the memory that weights and work leave free, what pages may take; the rest is for what no trial shows."""
CPU_BYTES = 2 * 2**30
"""Keys and values of a fast model on the CPU, where it only has to compute the same."""
PAGE = 64


@dataclass(frozen=True)
class Opened:
    """A model; whether it is the fast one; one line that says which, why, and what it holds."""

    model: Transformer | FastTransformer
    fast: bool
    said: str


def choose_forward(device: torch.device, forward: str = "auto") -> tuple[bool, str]:
    """Whether the fast model is to be used, and why. forward: "auto" takes it on a Hopper GPU, "plain", "fast".

    ValueError for another word; RuntimeError where the fast model was asked for and cannot be imported.
    """
    if forward not in FORWARDS:
        raise ValueError(f"forward is {forward!r}; one of {', '.join(FORWARDS)}")
    missing = importlib.util.find_spec("triton") is None
    if forward == "fast" and missing:
        raise RuntimeError("the fast model needs triton, which is not installed; the plain one runs without")
    if forward != "auto":
        return forward == "fast", "as asked for"
    obstacle = "triton is not installed" if missing else _no_hopper(device)
    return obstacle is None, obstacle or f"{device} is a Hopper GPU"


def open_model(
    checkpoint: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, *,
    forward: str = "auto", sequences: int = 1, positions: int | None = None, draft: int = 0,
    step_tokens: int = STEP_TOKENS, capture: bool = False,
) -> Opened:
    """Load a checkpoint folder.

    forward: see `choose_forward`. The rest is for the fast model. sequences: at once. positions: tokens that all their
    caches together hold; None takes what fits, at most all they could come to hold. draft: tokens that a decoder may
    take back. step_tokens: new tokens that will go through it at once. capture: capture the steps of decode now, not
    when first needed. Errors: those of `load_model`; ValueError, with the numbers, for caches that do not fit.
    """
    where = torch.device(device)
    fast, reason = choose_forward(where, forward)
    if not fast:
        return Opened(load_model(checkpoint, where, dtype), False, f"plain model: {reason}")
    from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool

    source = open_checkpoint(checkpoint)
    weights = lay_out(source, where, dtype, experts=_expert_form(source, where), projections=_projection_form(source))
    sizes = decode_sizes(sequences * (1 + draft))
    room = _room(weights, sequences, draft, sizes, step_tokens)
    held = _held(weights.config, sequences, positions, room)
    model = FastTransformer(weights, make_pool(weights, tokens=held, sequences=sequences, draft=draft), sizes=sizes)
    if capture and where.type == "cuda":
        model.capture()
    return Opened(model, True, f"fast model: {reason}; {weights.experts} experts, {weights.projections} projections, "
                               f"pages for {held:,} tokens ({model.pool.bytes / 1e9:.3g} GB)")


def decode_sizes(rows: int) -> tuple[int, ...]:
    """Powers of two up to the one that holds so many rows, 128 at most: what is captured."""
    return tuple(1 << n for n in range((min(rows, 128) - 1).bit_length() + 1))


def _no_hopper(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device}, the fast one is for Hopper GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) == (9, 0) else f"{device} has compute capability {major}.{minor}, not Hopper's 9.0"


def _expert_form(source: Source, device: torch.device) -> str:
    """As stored; small ones dense on the CPU, as the plain model has them there; bf16 ones in e4m3 on a GPU."""
    c, stored = source.config, source.experts(0, "down_proj")
    numbers = c.num_layers * c.num_experts * 3 * c.hidden_size * c.intermediate_size
    if device.type == "cpu" and 4 * numbers <= DENSE_LIMIT:
        return "dense"
    if isinstance(stored, Mxfp4):
        return "mxfp4"
    return "fp8" if isinstance(stored, Fp8) or device.type != "cpu" else "dense"


def _projection_form(source: Source) -> str:
    """e4m3 where the checkpoint has them so and Q, K and V are whole blocks: then nothing is rounded."""
    parts = [source.linear(f"model.layers.0.self_attn.{x}_proj") for x in "qkvo"]
    whole = all(isinstance(part, Fp8) for part in parts) and all(part.shape[0] % fp8.BLOCK == 0 for part in parts[:2])
    return "fp8" if whole else "dense"


def _held(config: ModelConfig, sequences: int, positions: int | None, room: int) -> int:
    """How many positions the pool gets, of `room` that fit. ValueError if that is none, or fewer than asked for."""
    if room < 1 or (positions or 0) > room:
        wanted = f"{sequences} sequences" if positions is None else f"{positions:,} tokens of {sequences} sequences"
        raise ValueError(f"keys and values of {wanted} do not fit: beside weights and work there is room for "
                         f"{max(0, room):,} tokens; ask for fewer at once")
    return positions or min(room, sequences * config.max_position_embeddings)


def _room(weights: FastWeights, sequences: int, draft: int, sizes: tuple[int, ...], step_tokens: int) -> int:
    """Positions that memory holds now; may be negative."""
    memory = CPU_BYTES
    if weights.device.type == "cuda":
        work = _work_bytes(weights, draft, sizes, min(step_tokens, weights.config.max_position_embeddings // 2))
        memory = int(SHARE * (_free_bytes(weights.device) - work))
    whole = positions_in(memory, weights.config, sequences, page_size=PAGE, draft=draft,
                         value_bytes=weights.dtype.itemsize)
    return whole - PAGE * sequences                        # the last page of each sequence may be all but empty


def _work_bytes(weights: FastWeights, draft: int, sizes: tuple[int, ...], tokens: int) -> int:
    """Device bytes that the largest steps take beside weights and pages: tried on a pool that holds two chunks."""
    from gptoss_lab.model.fast import FastTransformer, make_pool

    _free_bytes(weights.device)
    torch.cuda.reset_peak_memory_stats(weights.device)
    pool = make_pool(weights, tokens=2 * tokens, sequences=1, page_size=PAGE, draft=draft)
    model = FastTransformer(weights, pool, sizes=sizes[-1:], max_kv_len=weights.config.max_position_embeddings)
    ids, cache = torch.zeros(tokens, dtype=torch.int64, device=weights.device), model.new_cache()
    model.capture()
    for _ in range(2):
        model(ids, [tokens], [cache])
    torch.cuda.synchronize(weights.device)
    most, pages = torch.cuda.max_memory_reserved(weights.device), pool.bytes
    del model, pool, cache
    _free_bytes(weights.device)                            # workspaces of kernels stay: they are not free any more
    return max(0, most - pages - torch.cuda.memory_reserved(weights.device))


def _free_bytes(device: torch.device) -> int:
    """What could be taken on a GPU, after what nobody uses any more was given back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
