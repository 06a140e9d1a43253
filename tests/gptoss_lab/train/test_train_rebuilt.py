"""Two trainings compared: the shipped one and the one that was made again, and what must not pass as the same."""
import json
from copy import deepcopy
from pathlib import Path

import pytest

from gptoss_lab.train.card import model_card
from gptoss_lab.train.evaluate import share
from gptoss_lab.train.rebuilt import MUST, SHIPPED, compared, main

AGAIN = Path(SHIPPED).with_name("evaluation_again.json")


@pytest.fixture
def reports():
    return [json.loads(path.read_text(encoding="utf-8")) for path in (SHIPPED, AGAIN)]


def test_the_model_was_made_again_and_is_as_good(reports, capsys):
    assert reports[0]["training"]["steps"] != reports[1]["training"]["steps"], "two runs, not one file twice"
    found = {one.name: one for one in compared(*reports)}
    assert all(found[name].agree for name in MUST)
    assert [name for name, one in found.items() if not one.agree] == ["task backwards"]
    assert AGAIN.with_name("README.md").read_text(encoding="utf-8") == model_card(*reports)
    assert main([str(AGAIN)]) == 0 and "apart: task backwards" in capsys.readouterr().out


@pytest.mark.parametrize("name", MUST)
def test_a_worse_model_is_not_the_same(reports, name, tmp_path):
    worse = deepcopy(reports[1])
    at = worse["well_formed"] if name == "well-formed" else worse["exact_match"][name]
    at.update(share(int(0.9 * at["right"]), at["count"]))
    path = tmp_path / "worse.json"
    path.write_text(json.dumps(worse))
    assert not next(one for one in compared(reports[0], worse) if one.name == name).agree
    assert main([str(path)]) == 1


def test_an_evaluation_without_answers(reports):
    reports[1]["exact_match"]["in_range"]["count"] = 0
    with pytest.raises(ValueError, match="no answers under 'in_range'"):
        compared(*reports)
