"""`gptoss-lab cost`: the same numbers as the library, as a table, as JSON and as CSV; errors in one line."""
import csv
import io
import json

import pytest

from gptoss_lab import results
from gptoss_lab.cli import main
from gptoss_lab.config import preset
from gptoss_lab.cost import SERVED, Plan, decode_bound, prefill_bound


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Recorded rows, of which none is of an engine."""
    path = tmp_path_factory.mktemp("cost")
    rows = [row for row in results.read_rows(results.recorded_folder())
            if row["suite"] in ("attention", "serve") or row["case"].startswith("ceiling")]
    results.write_rows(path / "rows.jsonl", rows)
    return path


@pytest.fixture
def run(capsys, folder):
    """run(*arguments) -> (exit code, stdout, stderr) of `gptoss-lab cost` where no engine has been measured."""
    def call(*arguments):
        own = () if "--rows" in arguments else ("--rows", folder)
        code = main(["cost", *map(str, (*arguments, *own))])
        out, err = capsys.readouterr()
        return code, out, err
    return call


def test_an_estimate_as_json(run):
    code, out, _ = run("estimate", "--model", "120b", "--phase", "prefill", "--projections", "fp8", "--json")
    shown = json.loads(out)
    by_name = {line["answer"]: line for line in shown["answers"]}
    assert code == 0 and shown["question"]["config"] == "gpt-oss-120b" and shown["memory"]["fits"]
    assert by_name["bound"]["seconds"] == prefill_bound(preset("gpt-oss-120b"), 8192, precision=SERVED).seconds
    assert by_name["published"]["seconds"] == 0.364
    assert by_name["published"]["usd_per_million_tokens"] == pytest.approx(0.03703, abs=1e-5)
    assert by_name["measured"]["seconds"] is None and by_name["this engine"]["source"]


def test_an_estimate_as_a_table_and_as_csv(run):
    code, out, err = run("estimate", "--ep", 4, "--tp", 4, "--batch", 16)
    assert code == 0 and "EP4 DP1 TP4" in out and "kernels alone" in out and "fits in 141.0 GB" in err
    code, out, _ = run("estimate", "--ep", 4, "--tp", 4, "--batch", 16, "--csv")
    lines = {line["answer"]: line for line in csv.DictReader(io.StringIO(out))}
    bound = decode_bound(preset("gpt-oss-120b"), 8192, 16, SERVED, Plan(4, 1, 4)).seconds
    assert float(lines["bound"]["seconds"]) == pytest.approx(bound) and lines["measured"]["seconds"] == ""


def test_plans_in_all_forms(run):
    code, out, _ = run("plans", "--by", "kernels", "--json")
    lines = json.loads(out)
    assert code == 0 and len(lines) == 32 and {line["plan"] for line in lines} == {
        "EP1 DP1 TP1", "EP2 DP1 TP2", "EP4 DP1 TP4", "EP8 DP1 TP8"}
    assert any(line["front"] for line in lines) and not all(line["fits"] for line in lines)
    assert not any(line["front"] and not line["fits"] for line in lines)
    assert len(json.loads(run("plans", "--every", "--by", "bound", "--json")[1])) == 30 * 8
    dearer = json.loads(run("plans", "--by", "kernels", "--price", 6, "--json")[1])
    assert dearer[0]["usd_per_million_tokens"] == pytest.approx(2 * lines[0]["usd_per_million_tokens"])
    assert run("plans", "--phase", "prefill", "--by", "published", "--csv")[1].startswith("plan,batch,seconds,")


def test_the_published_rows(run):
    lines = json.loads(run("published", "--json")[1])
    assert len(lines) == 32 and all(line["cost_agrees"] for line in lines)
    assert {line["ours_is"] for line in lines} == {"kernels alone"}
    assert len(list(csv.DictReader(io.StringIO(run("published", "--csv")[1])))) == 32
    assert "23.9" in run("published")[1]


def test_a_fleet(run):
    code, out, _ = run("fleet", "--by", "kernels", "--rate", 5, "--json")
    shown = json.loads(out)
    assert code == 0 and shown["meets_goals"] and [pool["pool"] for pool in shown["pools"]] == ["prefill", "decode"]
    assert shown["simulated"]["usd_per_day"] == pytest.approx(24 * sum(pool["usd_per_hour"] for pool in shown["pools"]))
    assert len(list(csv.DictReader(io.StringIO(run("fleet", "--by", "kernels", "--rate", 5, "--csv")[1])))) == 1
    assert "Full at so many times this traffic" in run("fleet", "--by", "kernels", "--rate", 5)[1]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("estimate", "--model", "7b"), 2, "no preset is called '7b'"),
    (("estimate", "--ep", 3), 1, "ep 3 does not divide"),
    (("estimate", "--batch", 0), 1, "sequences is 0"),
    (("estimate", "--tokens", 200_000), 1, "exceed the 131072 positions"),
    (("estimate", "--utilisation", 2), 1, "utilisation is 2.0"),
    (("plans",), 1, "this engine: no decode rows of the fast engine have been measured yet"),
    (("plans", "--by", "published"), 1, "its decode charts were not published as numbers"),
    (("fleet", "--by", "kernels", "--rate", 0), 1, "requests_per_second is 0"),
    (("fleet", "--by", "kernels", "--first-token", 0.0001), 1, "prefill: no plan takes at most 0.0001 s"),
    (("estimate", "--rows", "nowhere.jsonl"), 1, "cannot read results from nowhere.jsonl"),
])
def test_errors_are_one_line(run, arguments, code, message):
    got, out, err = run(*arguments)
    assert got == code and out == "" and message in err and err.count("\n") == 1 and "Traceback" not in err


def test_without_a_word_the_recorded_rows_are_used(capsys):
    assert main(["cost", "estimate", "--json"]) == 0
    answers = {line["answer"]: line for line in json.loads(capsys.readouterr().out)["answers"]}
    assert list(answers)[0] == "bound" and "fast, fp8 experts, fp8 projections" in answers["measured"]["source"]
