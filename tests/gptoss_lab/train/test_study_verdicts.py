"""The rule, on rows made by hand: what counts as showing, and that nothing is judged without rows or by chance."""
import pytest

from gptoss_lab.train.evaluate import share
from gptoss_lab.train.study.names import BASELINE, CONTROL, EXACT, FAR, KL, SAME
from gptoss_lab.train.study.numbers import mcnemar, paired_difference
from gptoss_lab.train.study.variants import VARIANTS
from gptoss_lab.train.study.verdicts import CLAIMS, effects, verdicts


def row(case, variant, value, **conditions):
    return {"suite": "accuracy", "case": case, "backend": variant, "value": value, "peer": {"value": 0.97},
            "conditions": conditions}


def baseline(right=970):
    return row(EXACT, BASELINE, right / 1000, **share(right, 1000))


def variant(name, gained=0, lost=0, same=0.9, kl=1e-3, low=9e-4, high=1.1e-3):
    change = paired_difference(gained, lost, 1000)
    return [
        row(EXACT, name, 0.97 + (gained - lost) / 1000, count=1000, p=mcnemar(gained, lost), difference=change.value,
            difference_low=change.low, difference_high=change.high),
        row(SAME, name, same), row(KL, name, kl, low=low, high=high),
    ]


def test_the_rule():
    rows = [
        baseline(), *variant(CONTROL, 1, 1, 0.98, 1e-4, 8e-5, 1.2e-4), *variant("FP8 exact", same=1.0, kl=0.0),
        *variant("FP8 activations", 3, 5), *variant("window - 1", 0, 2, 0.99, 1e-4, 9e-5, 1.1e-4),
        *variant("sinks ignored", 5, 200), *variant("expert weights in bf16", 12, 2, kl=2e-4, low=1.3e-4),
    ]
    found = {name: effect.changes for name, effect in effects(rows).items()}
    assert found == {
        CONTROL: "no more", "FP8 exact": "nothing", "FP8 activations": "the odds", "window - 1": "no more",
        "sinks ignored": "the answers", "expert weights in bf16": "the odds",
    }
    shows = {v.claim.variant: v.shows for v in verdicts(rows)}
    assert shows == {
        "FP8 exact": True, "FP8 activations": None, "expert weights in bf16": False, "softmax before top-k": None,
        "sinks ignored": True, "window - 1": False, "window + 1": None, "YaRN rounded": None,
    }
    text = {v.claim.variant: v.sentence for v in verdicts(rows)}
    assert "shows, nothing changes. All 1,000 answers token by token the same, KL 0." in text["FP8 exact"]
    assert "only in the odds" in text["expert weights in bf16"] and "+1.00 points" in text["expert weights in bf16"]
    assert text["YaRN rounded"] == "YaRN's ramp is not rounded: not measured yet."
    assert ": shows. 77.5% right, the baseline 97.0%" in text["sinks ignored"]


def test_far_problems_are_a_test_of_their_own():
    def far(lost):
        change = paired_difference(0, lost, 100)
        return row(FAR, "YaRN rounded", 0.9, count=100, p=mcnemar(0, lost), difference=change.value,
                   difference_low=change.low, difference_high=change.high)

    near = [baseline(), *variant("YaRN rounded", 0, 1)]
    found = effects([*near, far(12)])["YaRN rounded"]
    assert found.changes == "the answers" and "90.0% right beyond 4,096 tokens" in found.words
    assert effects([*near, far(6)])["YaRN rounded"].changes == "the odds"       # p = 0.031: two tests, 0.025 each
    assert effects([baseline(), *variant("YaRN rounded", 0, 6)])["YaRN rounded"].changes == "the answers"


def test_more_variants_ask_for_a_smaller_p():
    lost = 8                                                # p = 2 / 256 = 0.0078: enough alone, not among ten
    alone = [baseline(), *variant("sinks ignored", 0, lost)]
    assert effects(alone)["sinks ignored"].changes == "the answers"
    many = alone + [r for n in range(9) for r in variant(f"other {n}")]
    assert effects(many)["sinks ignored"].changes == "the odds"


def test_a_quantisation_that_loses_answers_does_not_show():
    found = next(v for v in verdicts([baseline(), *variant("FP8 activations", 0, 60)])
                 if v.claim.variant == "FP8 activations")
    assert found.shows is False and "does not show" in found.sentence


def test_without_a_control_any_divergence_counts():
    assert effects([baseline(), *variant("window - 1", kl=1e-9, low=1e-10)])["window - 1"].changes == "the odds"


def test_a_model_at_chance_is_not_judged():
    found = {v.claim.variant: v for v in verdicts([
        baseline(20), *variant("sinks ignored", 0, 20), *variant("FP8 exact", same=1.0, kl=0.0)])}
    assert found["sinks ignored"].shows is None and "cannot be judged" in found["sinks ignored"].sentence
    assert found["FP8 exact"].shows is True                 # that nothing changed needs no accuracy


def test_the_last_row_counts_and_no_rows_are_no_verdict():
    rows = [baseline(), *variant("sinks ignored", 0, 200), *variant("sinks ignored", 0, 0)]
    assert effects(rows)["sinks ignored"].changes == "the odds"
    assert [v.shows for v in verdicts([])] == [None] * len(CLAIMS)
    assert all("not measured yet" in v.sentence for v in verdicts([baseline()]))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.variant)
def test_every_claim_is_about_a_variant_of_the_table(claim):
    assert claim.variant in {v.name for v in VARIANTS}
