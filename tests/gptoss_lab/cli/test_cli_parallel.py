"""`gptoss-lab plans`, and the sweep: its order, its rows, resuming, and what a wrong plan leaves."""
import json

import pytest

from gptoss_lab.bench import sweep
from gptoss_lab.bench.comm import comm_rows
from gptoss_lab.cli import main
from gptoss_lab.config import preset
from gptoss_lab.parallel import RankError, valid_plans
from gptoss_lab.results import read_rows


def test_plans_table(capsys):
    assert main(["plans", "--world", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["plan"] for r in rows[:9]] == [str(p) for p in valid_plans(preset("gpt-oss-120b"), 4)]
    by_name = {r["plan"]: r for r in rows}
    # Two all-reduces a layer and the embedding's: 73 of 2 * 3/4 * 5760 bytes, with TP4.
    assert by_name["EP4 DP1 TP4"]["received_bytes_per_token"] == round(73 * 1.5 * 5760)
    assert by_name["EP4 DP1 TP4"]["kv_bytes_per_token_and_layer"] == 2 * 2 * 64 * 2


def test_one_plan(capsys):
    assert main(["plans", "--plan", "ep4dp1tp4", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert ranks["3"] == ["query heads 48..63", "key/value heads 6..7", "experts 96..127",
                          "rows 0..2879 of each expert", "vocabulary rows 150816..201087"]


@pytest.mark.parametrize(("plan", "code", "message"), [
    ("TP4", 2, "a name such as EP4 DP1 TP4"), ("EP1 DP1 TP3", 1, "tp 3 does not divide the 64 query heads"),
])
def test_plans_that_are_none(capsys, plan, code, message):
    assert main(["plans", "--plan", plan]) == code
    assert message in capsys.readouterr().err


def test_cells_in_order_of_worth():
    names = [cell.name for cell in sweep.cells([preset("gpt-oss-120b")], 4)]
    assert names[:4] == [f"prefill gpt-oss-120b EP4 DP1 TP4 {n} x 1" for n in (8192, 32768, 65536, 128000)]
    assert names[4] == "decode gpt-oss-120b EP4 DP1 TP4 8192 x 1"
    # 9 plans and 6 with the split sequence; 4 prompts and 2 x 4 decode cells of each.
    assert len(names) == len(set(names)) == 15 * 12


class Fake:
    """Ranks that answer at once; `broken` names cells in which a rank dies."""

    backend, broken, log = "gloo", set(), []

    def __init__(self, world, *_, **__):
        self.world = world

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, function, *given):
        import torch

        name = function.__name__
        if name == "small_logits":
            exact = torch.eye(4)
            return [exact + (self.world > 1) * self.error] + [None] * (self.world - 1)
        if name in ("prefill", "decode"):
            if (name, *given[:2]) in self.broken:
                raise RankError("rank 1 ended with exit code -9 in " + name, 1)
            self.log.append((name, *given[:2]))
            return [[1.0, 2.0], [3.0, 1.0]]
        return [0.0] * self.world

    error = 0.0


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(sweep, "Ranks", Fake)
    monkeypatch.setattr(Fake, "broken", set())
    monkeypatch.setattr(Fake, "log", [])
    monkeypatch.setattr(Fake, "error", 0.0)
    monkeypatch.setattr(sweep, "valid_plans", lambda config, world, sequence_split=False:
                        [] if sequence_split else valid_plans(config, world)[:2])
    return Fake


def test_rows_are_written_and_not_measured_again(fake, tmp_path, capsys):
    out, nano = tmp_path / "sweep.jsonl", preset("nano")
    first = sweep.run(out, [nano], 2, small=True, comms=False)
    kinds = [row["suite"] for row in first]
    assert kinds.count("prefill") == 4 and kinds.count("decode") == 4 and kinds.count("accuracy") == 2
    prefill = next(row for row in first if row["suite"] == "prefill")
    assert prefill["raw"] == [3.0, 2.0], "of each reading the slowest rank"
    assert len(read_rows(out)) == len(first)
    fake.log.clear()
    assert sweep.run(out, [nano], 2, small=True, comms=False) == [] and not fake.log


def test_a_cell_that_fails_keeps_its_reason_and_the_rest_goes_on(fake, tmp_path, capsys):
    fake.broken = {("prefill", 200, 1)}
    rows = sweep.run(tmp_path / "sweep.jsonl", [preset("nano")], 2, small=True, comms=False)
    failed = [row for row in rows if row["value"] is None]
    assert [row["conditions"]["failed"] for row in failed] == ["rank 1 ended with exit code -9 in prefill"]
    assert sum(row["suite"] == "decode" for row in rows) == 4


def test_a_plan_with_other_logits_is_not_timed(fake, tmp_path, capsys):
    fake.error = 0.5
    rows = sweep.run(tmp_path / "sweep.jsonl", [preset("nano")], 2, small=True, comms=False)
    assert rows and all(row["value"] is None and "median relative error" in row["conditions"]["failed"] for row in rows)
    assert not fake.log


def test_no_time_left_begins_nothing(fake, tmp_path, capsys):
    rows = sweep.run(tmp_path / "sweep.jsonl", [preset("nano")], 2, seconds=0, small=True, comms=False)
    assert not [row for row in rows if row["suite"] in ("prefill", "decode")]


def test_only_some_plans(fake, tmp_path, capsys):
    plan = valid_plans(preset("nano"), 2)[1]
    rows = sweep.run(tmp_path / "sweep.jsonl", [preset("nano")], 2, small=True, comms=False, plans=[plan])
    assert {(r["conditions"]["ep"], r["conditions"]["dp"], r["conditions"]["tp"]) for r in rows} == {
        (plan.ep, plan.dp, plan.tp)}


def test_comm_rows_take_the_slowest_rank_and_name_the_target():
    plain = "nccl, add and norm apart"
    readings = [{plain: [10.0, 12.0], "triton one_shot": [5.0, 7.0]},
                {plain: [11.0, 9.0], "triton one_shot": [6.0, 6.0]}]
    rows = {row["backend"]: row for row in comm_rows(8, 2880, 2, readings, gpus=True)}
    assert rows["triton one_shot"]["raw"] == [6.0, 7.0] and rows["triton one_shot"]["conditions"]["target_us"] == 8.0
    assert rows["triton one_shot"]["peer"] == {"name": plain, "value": 12.0}
    assert rows[plain]["bound"] == pytest.approx(8 * 2880 * 2 / 450e9 * 1e6)
