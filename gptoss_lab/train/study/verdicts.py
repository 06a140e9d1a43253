"""Result rows of the study as sentences: what each variant changes, and which of the post's claims show.

The rule, the same for every variant:

    nothing       every greedy token is the baseline's and the mean KL is exactly 0
    the answers   McNemar's exact test on the same problems has p < 0.05 / number of tests (Bonferroni); a variant has
                  one test, or two where problems beyond 4,096 tokens were asked besides
    the odds      else, the KL's interval lies above that of the baseline answering in other batches, which is what
                  rounding alone does; without such a row, above 0
    no more       else: no more than rounding does

A claim of the form "this matters" shows if leaving it out changes the answers; "this costs nothing" if it changes
nothing, or no more than rounding does. In between lies what changes the odds but not the answers: then the sentence
says so and how large a difference the problems could have hidden. Where the baseline itself is right in less than half
of the problems nothing is judged by its answers.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gptoss_lab.train.study.names import BASELINE, CONTROL, EXACT, FAR, KL, SAME

Row = Mapping[str, Any]
ALPHA = 0.05
NOTHING, NO_MORE, ODDS, ANSWERS = "nothing", "no more", "the odds", "the answers"


@dataclass(frozen=True)
class Claim:
    """says: the claim. variant: what tests it. matters: whether it says that the variant's change costs accuracy."""

    says: str
    variant: str
    matters: bool


CLAIMS = (
    Claim("Weights shipped in MXFP4 can be served in FP8 with 128x128 block scales", "FP8 exact", False),
    Claim("Activations can be quantised to e4m3 in 1x128 groups", "FP8 activations", False),
    Claim("Computing the expert weights in bf16 is crucial for accuracy", "expert weights in bf16", True),
    Claim("The softmax of the router goes over the selected experts only", "softmax before top-k", True),
    Claim("Every head has a sink in its softmax", "sinks ignored", True),
    Claim("A sliding layer sees 128 keys, not 127", "window - 1", True),
    Claim("A sliding layer sees 128 keys, not 129", "window + 1", True),
    Claim("YaRN's ramp is not rounded", "YaRN rounded", True),
)


@dataclass(frozen=True)
class Effect:
    """A variant's rows, judged. changes: NOTHING, NO_MORE, ODDS or ANSWERS. words: the numbers behind it."""

    variant: str
    changes: str
    words: str


@dataclass(frozen=True)
class Verdict:
    """claim: as CLAIMS has it. shows: True, False, or None where it cannot be judged. sentence: for people."""

    claim: Claim
    shows: bool | None
    sentence: str


def effects(rows: Iterable[Row]) -> dict[str, Effect]:
    """Variant -> its effect, for every variant of the rows that has all three measures the rule needs."""
    last = {(row["case"], row["backend"]): row for row in rows if row["suite"] == "accuracy"}
    names = [name for case, name in last if case == KL]
    judged = [name for name in names if all((case, name) in last for case in (EXACT, SAME, KL))]
    control = last.get((KL, CONTROL))
    noise = 0.0 if control is None else control["conditions"].get("high", control["value"])
    tests = {name: [last[case, name] for case in (EXACT, FAR) if (case, name) in last] for name in judged}
    alpha = ALPHA / max(1, sum(map(len, tests.values())))
    return {name: _effect(name, tests[name], last[SAME, name], last[KL, name], alpha, noise) for name in judged}


def _effect(name: str, tests: list[Row], same: Row, kl: Row, alpha: float, noise: float) -> Effect:
    low = kl["conditions"].get("low", kl["value"])
    if same["value"] == 1.0 and kl["value"] == 0.0:
        count = sum(test["conditions"]["count"] for test in tests)
        return Effect(name, NOTHING, f"all {count:,} answers token by token the same, KL 0")
    words = "; ".join((*map(_answers, tests), f"{same['value']:.1%} of the prompts answered token by token the same",
                       f"KL {kl['value']:.2g} nats"))
    if any(test["conditions"]["p"] < alpha for test in tests):
        return Effect(name, ANSWERS, words)
    return Effect(name, ODDS if low > noise and name != CONTROL else NO_MORE, words)


def _answers(test: Row) -> str:
    found = test["conditions"]
    where = " beyond 4,096 tokens" if test["case"] == FAR else ""
    return (f"{test['value']:.1%} right{where}, the baseline {test['peer']['value']:.1%} (p = {found['p']:.2g}), "
            f"difference {100 * found['difference']:+.2f} points ({100 * found['difference_low']:+.2f} to "
            f"{100 * found['difference_high']:+.2f})")


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One verdict for each claim, in the order of CLAIMS; claims without rows say so."""
    rows = list(rows)
    found = effects(rows)
    base = next((r for r in reversed(rows) if (r["case"], r["backend"]) == (EXACT, BASELINE)), None)
    return [_verdict(claim, found.get(claim.variant), base) for claim in CLAIMS]


def _verdict(claim: Claim, effect: Effect | None, base: Row | None) -> Verdict:
    if effect is None or base is None:
        return Verdict(claim, None, f"{claim.says}: not measured yet.")
    if base["conditions"]["low"] < 0.5 and effect.changes != NOTHING:
        return Verdict(claim, None, f"{claim.says}: cannot be judged, the baseline is right in only "
                                    f"{base['value']:.1%} of the problems. {_capital(effect.words)}.")
    if claim.matters:
        shows = effect.changes == ANSWERS
        how = {NOTHING: "does not show, nothing changes", NO_MORE: "does not show",
               ODDS: "does not show in the answers, only in the odds", ANSWERS: "shows"}[effect.changes]
    else:
        shows = None if effect.changes == ODDS else effect.changes != ANSWERS
        how = {NOTHING: "shows, nothing changes", NO_MORE: "shows, no more changes than by rounding",
               ODDS: "the odds move, but not significantly many answers", ANSWERS: "does not show"}[effect.changes]
    return Verdict(claim, shows, f"{claim.says}: {how}. {_capital(effect.words)}.")


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
