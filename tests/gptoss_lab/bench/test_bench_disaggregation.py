"""`bench disaggregation` on two CPU ranks with nano: every row, and what the rows say of each other."""
import pytest

from gptoss_lab.bench import disaggregation
from gptoss_lab.bench.rank_model import RankSubject
from gptoss_lab.cli import main
from gptoss_lab.config import preset
from gptoss_lab.parallel import Plan
from gptoss_lab.results import read_rows


def test_rows_of_nano(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["bench", "disaggregation", "--model", "nano", "--small", "--tokens", "150", "--repetitions", "2",
                 "--out", str(out)]) == 0
    rows = {row["case"]: row for row in read_rows(out)}
    assert len(rows) == 5 and {row["suite"] for row in rows.values()} == {"disaggregation"}
    for row in rows.values():
        assert row["value"] > 0 and len(row["raw"]) == 2 and row["bound"] is None
        assert row["conditions"]["tokens"] == 150 and row["conditions"]["ranks"] == "gloo"
    assert "hidden" in capsys.readouterr().out


def test_what_is_hidden():
    """Prefill 1 s, hand-over 0.2 s, together 1.05 s: three quarters hide. The slower rank counts."""
    reading = {"prefill": [1.0] * 3, "hand-over": [0.1] * 3, "together": [1.05] * 3, "first token": [1.2] * 3,
               "one engine": [1.1] * 3}
    other = reading | {"prefill": [0.0] * 3, "hand-over": [0.2] * 3, "one engine": [0.0] * 3}
    rows = disaggregation.rows_of(RankSubject(preset("gpt-oss-120b"), Plan(), "fp8"), 8192, [reading, other], "nccl", 2)
    alone, prefill, together, first, one = rows
    assert alone["value"] == pytest.approx(306_671_616 / 0.2 / 1e9) and alone["bound"] == 450.0
    assert together["conditions"]["hidden_share"] == pytest.approx(0.75)
    assert together["peer"]["value"] == pytest.approx(1.2) and prefill["value"] == 1.0
    assert first["peer"] == {"name": "one engine", "value": 1.1} and one["value"] == 1.1


def test_a_wrong_token_is_not_timed():
    class Both:
        def all_gather(self, x, counts, what):
            import torch
            return torch.tensor([[3, 4], [3, 5]])

    import torch

    own = type("Own", (), {"device": torch.device("cpu"), "rank": 0})()
    half = disaggregation.Half(own, Both(), None, [])
    with pytest.raises(RuntimeError, match=r"decode rank comes to the tokens \[3, 5\]; one engine to \[3, 4\]"):
        disaggregation._compare(half, None, [3, 4])
