"""The command: rows of the one schema, paired with the baseline; what --identical proves; bad input."""
import json

import pytest

from gptoss_lab.results import read_rows
from gptoss_lab.train.settings import Settings
from gptoss_lab.train.study import __main__ as command
from gptoss_lab.train.study import variants
from gptoss_lab.train.study.names import BASELINE, EXACT, EXPERTS, FAR, KL, LOSS, SAME
from gptoss_lab.train.study.numbers import mean_per_token
from gptoss_lab.train.study.rows import Outcome, checksum, outcome_rows
from gptoss_lab.train.study.variants import VARIANTS
from gptoss_lab.train.study.verdicts import effects


@pytest.fixture
def short(monkeypatch):
    """Answers of 12 tokens."""
    prepare = command.prepare
    monkeypatch.setattr(command, "prepare", lambda *a: prepare(*a, answer_tokens=12))


def test_rows_of_every_measure_are_written(studied, tmp_path, short, capsys):
    out = tmp_path / "rows.jsonl"
    assert command.main([
        "--checkpoint", str(studied.file), "--out", str(out), "--problems", "5",
        "--variant", "FP8 exact", "--variant", "sinks ignored",
    ]) == 0
    rows = read_rows(out, suite="accuracy", model="study")
    found = {(r["case"], r["backend"]): r for r in rows}
    names = (BASELINE, "FP8 exact", "sinks ignored")
    assert len(found) == len(rows) == 3 * 2 + 2 * 3
    assert set(found) == {(c, n) for c in (EXACT, LOSS) for n in names} | {
        (c, n) for c in (SAME, KL, EXPERTS) for n in names[1:]}
    assert found[SAME, "FP8 exact"]["value"] == found[EXPERTS, "FP8 exact"]["value"] == 1.0
    assert found[KL, "FP8 exact"]["value"] == 0.0 < found[KL, "sinks ignored"]["value"]
    assert found[LOSS, "FP8 exact"]["conditions"]["difference"] == 0.0
    assert found[EXACT, BASELINE]["conditions"]["count"] == 5
    assert found[EXACT, BASELINE]["peer"] is None and found[EXACT, "FP8 exact"]["peer"]["name"] == BASELINE
    assert {r["conditions"]["checkpoint"] for r in rows} == {checksum(studied.forms.path("mxfp4"))}
    said = capsys.readouterr().out
    assert "FP8 exact changes nothing" in said and "shows, nothing changes" in said


def test_identical_holds_for_exact_weights_and_fails_for_others(studied, tmp_path, short, monkeypatch, capsys):
    arguments = ["--checkpoint", str(studied.file), "--out", str(tmp_path / "r.jsonl"), "--problems", "4",
                 "--identical"]
    assert command.main(arguments) == 0
    assert "FP8 exact: 0 of 4 right, 4 token by token as the baseline" in capsys.readouterr().out
    monkeypatch.setitem(variants.FORMS, "fp8", {"scales": "amax"})
    assert command.main(arguments) == 1
    assert len(read_rows(tmp_path / "r.jsonl")) == 14           # appended, variant by variant


def test_paired_numbers_are_of_the_same_problems(studied):
    class Attempt:
        def __init__(self, done, written):
            self.done, self.written = done, [[written]]

    class Reading:
        def __init__(self, losses):
            self.losses, self.counts, self.divergences = losses, [2, 3, 5, 4], [0.1, 0.2, 0.3, 0.4]

        def experts_unchanged(self, other):
            return 3, 4

    base = Outcome(variants.BASELINE, [Attempt(d, 0) for d in (True, True, False, True)], 1, Reading([1.0, 2, 3, 4]), 1)
    this = Outcome(VARIANTS[2], [Attempt(d, w) for d, w in ((True, 0), (False, 0), (True, 1), (False, 0))], 1,
                   Reading([1.5, 2, 2, 4]), 2.0)
    rows = {r["case"]: r for r in outcome_rows(this, base, model="m", checkpoint="c", seed=0, device="cpu")}
    exact, far = rows[EXACT]["conditions"], rows[FAR]["conditions"]
    assert (exact["gained"], exact["lost"], exact["count"], exact["right"], exact["p"]) == (1, 1, 3, 2, 1.0)
    assert (far["gained"], far["lost"], far["count"], rows[FAR]["value"]) == (0, 1, 1, 0.0)
    assert rows[SAME]["value"] == 0.75 and rows[EXPERTS]["value"] == 0.75
    assert rows[KL]["value"] == pytest.approx(1.0 / 14)
    change = mean_per_token([0.5, 0, -1, 0], [2, 3, 5, 4])
    assert rows[LOSS]["conditions"]["difference"] == change.value == pytest.approx(-0.5 / 14)
    assert rows[LOSS]["conditions"]["difference_low"] == change.low
    assert json.loads(json.dumps(rows)) == rows and set(effects(rows.values())) == {VARIANTS[2].name}


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["--checkpoint", "nowhere"], "nowhere"), (["--checkpoint", ".", "--variant", "fp7"], "no variant is called 'fp7'"),
])
def test_bad_input_is_one_line(arguments, complaint, tmp_path, capsys):
    assert command.main([*arguments, "--out", str(tmp_path / "x.jsonl"), "--problems", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said and said.count("\n") == 1
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(("option", "complaint"), [
    (("--problems", "0"), "0 problems; at least 1 is needed"), (("--far", "-1"), "-1 problems; at least 0 is needed"),
    (("--device", "abacus"), "invalid choice: 'abacus'"),
])
def test_impossible_options_are_refused(option, complaint, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--checkpoint", ".", "--out", str(tmp_path / "x.jsonl"), *option])
    assert complaint in capsys.readouterr().err


def test_answers_may_be_as_long_as_in_the_evaluation_of_training(studied, tmp_path):
    study = command.prepare(studied.file, tmp_path, 2, 1)
    assert study.answer_tokens == Settings().answer_tokens and len(study.dialogues) == len(study.rendered) == 3
    assert study.far == 1 and [len(d.ids) > 4_096 for d in study.rendered] == [False, False, True]
