"""The load script itself: it counts every token, and sees one that is wrong."""
import pytest

from gptoss_lab.harmony import decode, encode
from gptoss_lab.results import read_rows, validate
from gptoss_lab.serve import load
from gptoss_lab.serve.echo import HEADER, expected


class Usage:
    completion_tokens = 20


def test_what_an_echo_says_is_known_beforehand():
    body = encode("naïve 𝒳 ")
    assert expected("naïve 𝒳 ", len(HEADER) + len(body)) == body
    assert expected("naïve 𝒳 ", len(HEADER) + 2 * len(body) + 1) == [*body, *body, body[0]]
    assert expected("x", 2) == []


def test_a_wrong_text_and_a_wrong_count_are_seen():
    tally = load.Tally()
    right = decode(expected("stone river", 20))
    load._check(tally, 1, "stone river", 20, right, Usage())
    assert tally.wrong == [] and (tally.answers, tally.tokens) == (1, 20)
    for got, usage, wanted in ((right[:-1], Usage(), 20), (right, Usage(), 21), (right, None, 20),
                               (right.replace("stone", "lamp", 1), Usage(), 20)):
        before = len(tally.wrong)
        load._check(tally, 1, "stone river", wanted, got, usage)
        assert len(tally.wrong) == before + 1


def test_a_short_load_loses_and_mixes_nothing_and_its_rows_are_rows(tmp_path):
    """16 clients for two seconds, every token checked; the rows hold what was measured."""
    file = tmp_path / "serve.jsonl"
    code = load.main(["--clients", "16", "--seconds", "2", "--interval", "0.02", "--out", str(file)])
    assert code == 0
    rows = read_rows(file, suite="serve")
    assert [row["metric"] for row in rows] == ["microseconds", "tokens_per_second", "seconds", "seconds"]
    for row in rows:
        validate(row)
        assert row["conditions"]["wrong_answers"] == 0 and row["conditions"]["answers"] >= 16 and row["value"] > 0
    assert rows[0]["value"] < 2000  # microseconds a token: the limit of 200 is for a quiet machine


def test_a_wrong_command_line_is_refused(capsys):
    for wrong in (["--clients", "0"], ["--clients", "1000"], ["--seconds", "6000"], ["--interval", "-1"]):
        with pytest.raises(SystemExit):
            load.main(wrong)
    assert "are expected" in capsys.readouterr().err
