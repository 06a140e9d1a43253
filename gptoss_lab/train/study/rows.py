"""What the study measured, as result rows: one row for each measure of each variant.

    case                                metric     unit    value
    exact match                         accuracy   share   problems answered exactly right
    exact match beyond 4,096 tokens     accuracy   share   the same of recall from long lists
    greedy tokens as the baseline       accuracy   share   prompts whose every new token is the baseline's
    expert sets as the baseline         accuracy   share   pairs of a token and a layer with the same experts
    held-out loss                       kl         nats    cross-entropy on the right answers (log of the perplexity)
    KL to the baseline                  kl         nats    mean over the tokens of the right answers

`backend` is the variant. Conditions hold the interval (`low`, `high`), what it counts, for paired measures the
difference with its interval and the test, and the checkpoint's checksum; `peer` is the baseline, of the same run.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_lab.results import make_row
from gptoss_lab.train.evaluate import Attempt, share
from gptoss_lab.train.study.measure import Reading
from gptoss_lab.train.study.names import EXACT, EXPERTS, FAR, KL, LOSS, SAME
from gptoss_lab.train.study.numbers import Estimate, mcnemar, mean_per_token, paired_difference
from gptoss_lab.train.study.variants import BASELINE, Variant

Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What one variant did. far: how many of the attempts, the last ones, are beyond 4,096 tokens. seconds: it took."""

    variant: Variant
    attempts: Sequence[Attempt]
    far: int
    reading: Reading
    seconds: float

    @property
    def near(self) -> int:
        """Attempts that are not far."""
        return len(self.attempts) - self.far


def outcome_rows(this: Outcome, baseline: Outcome, **conditions: Any) -> list[Row]:
    """All rows of a variant. conditions: model, seed, checkpoint and what else is shared."""
    shared = conditions | {"what": this.variant.what, "study_seconds": round(this.seconds, 1)}
    rows = [_exact(EXACT, this, baseline, slice(0, this.near), shared)]
    if this.far:
        rows.append(_exact(FAR, this, baseline, slice(this.near, None), shared))
    rows.append(_loss(this, baseline, shared))
    if this.variant is BASELINE:
        return rows
    return [*rows, _same(this, baseline, shared), _divergence(this, shared), _experts(this, baseline, shared)]


def identical(this: Outcome, baseline: Outcome) -> int:
    """Prompts whose every greedy token is the baseline's."""
    return sum(a.written == b.written for a, b in zip(this.attempts, baseline.attempts, strict=True))


def checksum(folder: Path) -> str:
    """First 12 hex digits of the SHA-256 of the checkpoint's weights: its safetensors files, by name."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


def _exact(case: str, this: Outcome, baseline: Outcome, of: slice, shared: dict[str, Any]) -> Row:
    mine, theirs = ([bool(a.done) for a in outcome.attempts[of]] for outcome in (this, baseline))
    gained, lost = sum(m and not t for m, t in zip(mine, theirs, strict=True)), sum(
        t and not m for m, t in zip(mine, theirs, strict=True))
    difference = paired_difference(gained, lost, len(mine))
    paired = {} if this is baseline else {
        "gained": gained, "lost": lost, "p": mcnemar(gained, lost), **_interval(difference, "difference")}
    return _share(case, this, share(sum(mine), len(mine)), sum(theirs) / len(theirs), shared | paired)


def _same(this: Outcome, baseline: Outcome, shared: dict[str, Any]) -> Row:
    return _share(SAME, this, share(identical(this, baseline), len(this.attempts)), 1.0, shared)


def _experts(this: Outcome, baseline: Outcome, shared: dict[str, Any]) -> Row:
    return _share(EXPERTS, this, share(*this.reading.experts_unchanged(baseline.reading)), 1.0, shared)


def _share(case: str, this: Outcome, found: dict[str, float | int], peer: float, shared: dict[str, Any]) -> Row:
    return make_row(
        "accuracy", case, this.variant.name, "accuracy", [found["share"]], "share", statistic="single",
        peer=_peer(this, peer), **shared, **{k: found[k] for k in ("right", "count", "low", "high")},
    )


def _loss(this: Outcome, baseline: Outcome, shared: dict[str, Any]) -> Row:
    mine, theirs = this.reading, baseline.reading
    loss = mean_per_token(mine.losses, mine.counts)
    change = [m - t for m, t in zip(mine.losses, theirs.losses, strict=True)]
    paired = {} if this is baseline else _interval(mean_per_token(change, mine.counts), "difference")
    return make_row(
        "accuracy", LOSS, this.variant.name, "loss", [loss.value], "nats", statistic="single",
        peer=_peer(this, mean_per_token(theirs.losses, theirs.counts).value),
        **shared, **_interval(loss), **paired, perplexity=math.exp(loss.value), count=sum(mine.counts),
        dialogues=len(mine.counts),
    )


def _divergence(this: Outcome, shared: dict[str, Any]) -> Row:
    found = this.reading.divergences
    counts = this.reading.counts[: len(found)]
    kl = mean_per_token(found, counts)
    return make_row(
        "accuracy", KL, this.variant.name, "kl", [kl.value], "nats", statistic="single", peer=_peer(this, 0.0),
        **shared, **_interval(kl), count=sum(counts), dialogues=len(counts),
    )


def _interval(found: Estimate, name: str = "") -> dict[str, float]:
    """Conditions of an estimate. An infinite end is left out: JSON has none."""
    ends = {"low": found.low, "high": found.high}
    kept = {f"{name}_{end}".lstrip("_"): value for end, value in ends.items() if math.isfinite(value)}
    return kept | ({name: found.value} if name else {})


def _peer(this: Outcome, value: float) -> tuple[str, float] | None:
    return None if this.variant is BASELINE else (BASELINE.name, value)
