"""Before anything is timed: the very weights that are timed, a few of their layers, against the plain model in fp32.

One sliding and one full layer of the real shapes between embedding and head. A prompt longer than two windows is read
in one piece, again in chunks, and continued by captured decode steps with spare rows; every logit is compared with the
plain forward in fp32 over the same tensors (`LaidOut`), in which no activation is rounded to e4m3.

Tolerances are relative errors of a row of logits, norm over norm, the median over rows: an expert that flips at a
near-tie throws a single row off and says nothing of the kernels. Two e4m3 roundings of activations (2.6 % each) in an
expert layer give about 2.5 % here, two more in e4m3 projections about 4.5 %, bf16 alone under 1 %; the plain kernels in
fp32 are exact but for the order of sums. With keys and values in e4m3 the plain forward has such a pool too, of the
same scales; a key that lies near the middle of two codes may then fall to either side, which half as much again allows.
"""
from __future__ import annotations

import torch

from gptoss_lab.bench.fast_model import Row, Rows, Subject, give_back, loaded, random_ids
from gptoss_lab.model import Transformer
from gptoss_lab.model.fast import FastTransformer, FastWeights, LaidOut, make_pool
from gptoss_lab.model.kv_scales import measured_scales
from gptoss_lab.model.load import build_model
from gptoss_lab.model.paged import PagePool
from gptoss_lab.results import make_row

LAYERS, PROMPT, CHUNKS, DECODED = 2, 300, (130, 170), 4
TOLERANCE = {"experts and projections in e4m3": 0.05, "experts in e4m3": 0.03, "bf16": 0.01, "fp32": 1e-4}
NEAR = 0.8                      # share of rows within twice the tolerance
CLEAR = 5.0                     # a margin between the first two logits of so many tolerances (in deviations) is clear


class WrongResult(RuntimeError):
    """The fast forward does not agree with the plain one; nothing is timed."""


def tolerance(subject: Subject, model: FastTransformer) -> float:
    """By what runs: the plain backends round no activation to e4m3."""
    experts = model.operations.moe_layer.backend != "reference"
    projections = subject.projections == "fp8" and model.operations.fp8_linear.backend != "reference"
    if projections:
        return TOLERANCE["experts and projections in e4m3"]
    return TOLERANCE["experts in e4m3" if experts else "bf16" if subject.dtype == torch.bfloat16 else "fp32"]


@torch.inference_mode()
def prepared(
    subject: Subject, rows: Rows, weights: FastWeights | None, checked: bool, kv_form: str = "same"
) -> FastWeights:
    """The weights that are to be timed: laid out unless given, and checked if asked for; rows of both are added."""
    if weights is None:
        weights, about = loaded(subject)
        rows.add(about)
    if checked:
        rows.add([check(subject, weights, kv_form=kv_form)])
    return weights


def check(subject: Subject, weights: FastWeights, layers: int = LAYERS, kv_form: str = "same") -> Row:
    """A row of suite "accuracy" with the share of equal top-1 among clear margins. WrongResult if the errors are larger
    than the tolerance, or a clear top-1 differs."""
    few = weights.first(min(layers, weights.config.num_layers))
    total = PROMPT + DECODED
    ids = random_ids(few.config, total, subject.device, seed=1)
    plain = build_model(LaidOut(few), subject.device, torch.float32, expert_storage="stored", backends=dict.fromkeys(
        ("rms_norm", "rope", "sink_attention", "route", "moe"), "reference"))
    pool, kept = make_pool(few, tokens=3 * total, sequences=3, kv_form=kv_form), subject.conditions["kv"]
    if kv_form == "fp8":
        exact, kept = _plain_over_fp8(plain, pool, ids), "float8_e4m3fn"
    else:
        exact = plain(ids, logits="all")
    del plain
    give_back(subject.device)
    model = FastTransformer(few, pool, sizes=(4,))
    limit, worst = tolerance(subject, model) * (1.5 if kv_form == "fp8" else 1), 0.0
    found = {"one piece": _logits(model, ids, (PROMPT,)), "chunks": _logits(model, ids, CHUNKS)}
    same, clear = 0, 0
    for how, logits in found.items():
        error = ((logits - exact).norm(dim=1) / exact.norm(dim=1)).median()
        if not float(error) <= limit:
            raise WrongResult(f"{subject.backend}, prompt in {how}: median relative error of the logits is "
                              f"{float(error):.3g}; at most {limit} is right")
        worst = max(worst, float(error))
        first = exact.topk(2, dim=1)
        certain = (first.values[:, 0] - first.values[:, 1]) > CLEAR * limit * exact.std(dim=1)
        near = (logits - exact).norm(dim=1) / exact.norm(dim=1) <= 2 * limit           # no expert flipped in the row
        if float(near.float().mean()) < NEAR:
            raise WrongResult(f"{subject.backend}, prompt in {how}: {float(near.float().mean()):.0%} of the rows are "
                              f"within twice the tolerance of {limit}; at least {NEAR:.0%} should be")
        agree = logits.argmax(dim=1) == first.indices[:, 0]
        same, clear = same + int((agree & certain & near).sum()), clear + int((certain & near).sum())
    if same < clear:
        raise WrongResult(f"{subject.backend}: {clear - same} of {clear} clear first choices differ; all must agree")
    return make_row(
        "accuracy", f"fast against plain fp32, {few.config.num_layers} layers of the timed weights", subject.backend,
        "accuracy", [same / clear if clear else 1.0], "share of equal top-1", bound=1.0, statistic="single",
        **subject.conditions | {"layers": few.config.num_layers, "tokens": total, "batch": 1, "clear_rows": clear,
                                "median_relative_error": round(worst, 5), "tolerance": limit, "kv": kept},
    )


def _plain_over_fp8(plain: Transformer, pool: PagePool, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] logits of the plain forward over an e4m3 pool; `pool` gets the same scales, measured on these ids."""
    scales = measured_scales(lambda part, cache: plain(part, caches=[cache], logits="none"), plain.new_cache, [ids])
    twin = PagePool(plain.config, pages=pool.pages, rings=2, dtype=plain.dtype, device=pool.device, kv_form="fp8")
    for ours in (pool, twin):
        ours.key_scales.copy_(scales[0])
        ours.value_scales.copy_(scales[1])
    return plain(ids, caches=[twin.new_cache()], logits="all")


def _logits(model: FastTransformer, ids: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    """[T, V] logits of every position: the prompt in chunks, the rest decoded."""
    cache, at, parts = model.new_cache(), 0, []
    try:
        for size in (*chunks, *[1] * (len(ids) - sum(chunks))):
            parts.append(model(ids[at : at + size], [size], [cache], logits="all" if size > 1 else "last"))
            at += size
        return torch.cat(parts)
    finally:
        cache.release()
