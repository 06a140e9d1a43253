"""The result row: what is refused, what is written, what comes back."""
import json

import pytest

from gptoss_lab import results
from gptoss_lab.results import ResultError, difference, make_row, read_rows, validate, write_rows


def _row(raw=(2.0, 1.0, 3.0), **kwargs):
    given = {"suite": "moe", "case": "gemm1", "backend": "gluon", "metric": "microseconds", "unit": "us"}
    given.update(kwargs)
    return make_row(raw=raw, **given)


def test_value_is_the_statistic_and_spread_the_range_over_the_median():
    row = _row(tokens=8192, model="gpt-oss-20b", peer=("deepgemm", 2.5))
    assert row["value"] == 2.0 and row["spread"] == 1.0 and row["raw"] == [2.0, 1.0, 3.0]
    assert row["peer"] == {"name": "deepgemm", "value": 2.5} and row["conditions"]["tokens"] == 8192
    assert _row(raw=(1.0, 2.0, 4.0, 8.0))["value"] == 3.0
    assert _row(statistic="max")["value"] == 3.0


@pytest.mark.parametrize(
    ("key", "value"),
    [("suite", "speed"), ("metric", "furlongs"), ("value", "fast"), ("date", "today"), ("peer", {"name": "x"}),
     ("repetitions", 0), ("statistic", "best"), ("value", float("nan")), ("bound", float("inf")), ("command", "")],
)
def test_a_wrong_value_is_refused_by_name(key, value):
    row = {**_row(), key: value}
    with pytest.raises(ResultError, match=key):
        validate(row)


def test_missing_and_unknown_keys_are_refused():
    row = _row()
    with pytest.raises(ResultError, match="gpu"):
        validate({k: v for k, v in row.items() if k != "gpu"})
    with pytest.raises(ResultError, match="colour"):
        validate({**row, "colour": "red"})


def test_a_row_without_a_value_says_why():
    failed = _row(raw=(), failed="did not fit: 150 GB of 141")
    assert failed["value"] is None and failed["conditions"]["failed"].startswith("did not fit")
    with pytest.raises(ResultError, match="no readings"):
        _row(raw=())
    with pytest.raises(ResultError, match="failed"):
        validate({**_row(), "value": None})


def test_write_is_all_or_nothing_and_read_filters(tmp_path):
    file = tmp_path / "moe" / "a.jsonl"
    write_rows(file, [_row(tokens=1), _row(tokens=8)])
    with pytest.raises(ResultError):
        write_rows(file, [_row(tokens=9), {**_row(), "metric": "x"}])
    assert [r["conditions"]["tokens"] for r in read_rows(file)] == [1, 8]
    write_rows(file, [_row(tokens=32, backend="triton")])
    assert len(read_rows(tmp_path)) == 3
    assert [r["backend"] for r in read_rows(tmp_path, tokens=32)] == ["triton"]
    assert read_rows(tmp_path, suite="serve") == []
    with pytest.raises(ResultError, match="jsonl"):
        write_rows(tmp_path / "a.json", [_row()])


def test_a_broken_line_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(_row()) + "\n{\n")
    with pytest.raises(ResultError, match="line 2"):
        read_rows(file)


def test_difference_meets_on_case_and_conditions():
    ours = [_row(raw=[4.0], tokens=8), _row(raw=[9.0], tokens=1)]
    yours = [_row(raw=[2.0], tokens=8), _row(raw=[5.0], tokens=64)]
    first, second = difference(ours, yours)
    assert (first["recorded"], first["yours"], first["ratio"]) == (4.0, 2.0, 0.5)
    assert (second["recorded"], second["ratio"], second["recorded_on"]) == (None, None, None)


def test_every_recorded_row_of_the_project_is_valid():
    for row in read_rows(results.recorded_folder()):
        assert row["raw"] or row["value"] is None


def test_rows_of_other_plans_and_sizes_do_not_meet(tmp_path):
    """A split prompt, fewer layers: other rows; the table says which they are."""
    def one(value, **more):
        return make_row("decode", "decode over ranks", "x", "ms_per_step", [value], "ms", model="nano", ep=2, dp=1,
                        tp=2, batch=8, tokens=64, **more)

    ours = [one(1.0, sequence_split=False), one(2.0, sequence_split=True), one(4.0, layers=2)]
    found = difference(ours, [one(3.0, sequence_split=True), one(3.0), one(3.0, layers=2), one(3.0, layers=1)])
    assert [(row["recorded"], row["sequence_split"], row["layers"]) for row in found] == [
        (2.0, True, None), (1.0, None, None), (4.0, None, 2), (None, None, 1)]
    assert {row["batch"] for row in found} == {8} and {row["tp"] for row in found} == {2}


@pytest.mark.parametrize(("text", "message"), [
    (b"3\n", "line 1: a JSON object"), (b"\nnull\n", "line 2: a JSON object"), (b"\xff\n", "not UTF-8")])
def test_what_is_no_row_is_named_with_its_file(tmp_path, text, message):
    file = tmp_path / "odd.jsonl"
    file.write_bytes(text)
    with pytest.raises(ResultError, match=message) as caught:
        read_rows(file)
    assert "odd.jsonl" in str(caught.value)
