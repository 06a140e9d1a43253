"""Real processes over gloo: the tokens of one rank, places from torch's device mesh, ends that leave nothing behind."""
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import rank_work
import torch

from gptoss_lab.bench import comm
from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.disaggregation_routes import Pair
from gptoss_lab.engine.ranks import merged
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, RankError, Ranks, place_of, valid_plans

PROMPTS = [[5, 6, 7] * 15, [1], [900, 3, 17, 4]]
SAMPLING = [SamplingParams(temperature=0, max_new_tokens=8)] * 2 + [
    SamplingParams(temperature=1.0, top_k=30, top_p=0.95, seed=4, max_new_tokens=8)]
LIMIT = 12.0        # seconds in which a broken group must have ended on a busy machine; its own limits are below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = replace(preset("nano"), name="small", num_layers=3, vocab_size=1021, sliding_window=16,
                     eos_token_ids=(2,), pad_token_id=1)
    path = tmp_path_factory.mktemp("gloo") / "small"
    synth(config, path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    return [c.tokens for c in Engine(load_model(folder, dtype=torch.float32)).complete(PROMPTS, SAMPLING)]


@pytest.fixture(scope="module")
def four():
    with Ranks(4, timeout=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize("plan", [*valid_plans(preset("nano"), 2), Plan(2, 1, 2, True)], ids=str)
def test_tokens_of_two_ranks(two, folder, expected, plan):
    assert [c.tokens for c in merged(two.run(rank_work.complete, folder, plan, PROMPTS, SAMPLING))] == expected


@pytest.mark.parametrize("plan", [Plan(1, 1, 4), Plan(4, 1, 4), Plan(2, 2, 2), Plan(2, 4, 1), Plan(4, 1, 4, True)],
                         ids=str)
def test_tokens_of_four_ranks(four, folder, expected, plan):
    assert [c.tokens for c in merged(four.run(rank_work.complete, folder, plan, PROMPTS, SAMPLING))] == expected


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(2, 1, 2, True), Plan(2, 2, 1)], ids=str)
def test_tokens_of_the_fast_forward(two, folder, expected, plan):
    """Greedy and sampled, from shards of the logits; groups with different numbers of sequences."""
    found = two.run(rank_work.complete_fast, folder, plan, PROMPTS, SAMPLING)
    assert [c.tokens for c in merged([completions for completions, _ in found])] == expected
    assert all(("and this is cpu" in reason) == (plan.tp > 1) for _, reason in found)


@pytest.mark.parametrize("plan", [Plan(4, 2, 2), Plan(4, 1, 4, True)], ids=str)
def test_tokens_of_the_fast_forward_on_four(four, folder, expected, plan):
    found = four.run(rank_work.complete_fast, folder, plan, PROMPTS, SAMPLING, plan.sequence_split)
    assert [c.tokens for c in merged([completions for completions, _ in found])] == expected


@pytest.mark.parametrize("plan", [Plan(4, 4, 1), Plan(2, 2, 2, True)], ids=str)
def test_tokens_with_routed_dispatch(four, folder, expected, plan):
    found = four.run(rank_work.complete, folder, plan, PROMPTS, SAMPLING, "all_to_all")
    assert [c.tokens for c in merged(found)] == expected


@pytest.mark.parametrize("plan", [Plan(1, 1, 4), Plan(2, 2, 2), Plan(4, 2, 2), Plan(1, 4, 1)], ids=str)
def test_places_come_from_the_device_mesh(four, plan):
    for rank, (place, tp, tp_size, dp, dp_size) in enumerate(four.run(rank_work.places, plan)):
        assert place == place_of(plan, rank)
        assert (tp_size, dp_size) == (plan.tp, plan.dp)
        assert (tp, dp) == (place.tp if plan.tp > 1 else 0, place.dp if plan.dp > 1 else 0)


@pytest.mark.parametrize("pair", [Pair(Plan(1, 1, 2), Plan(1, 1, 2)), Pair(Plan(1, 1, 3, True), Plan())], ids=str)
def test_prefill_and_decode_on_different_processes(four, folder, expected, pair):
    found = four.run(rank_work.hand_over, folder, pair, PROMPTS, SAMPLING)
    assert [c.tokens for c in merged(found)] == expected


def test_prefill_and_decode_on_two_processes(two, folder, expected):
    found = two.run(rank_work.hand_over, folder, Pair(Plan(), Plan()), PROMPTS, SAMPLING)
    assert found[0] == {} and [c.tokens for c in merged(found)] == expected


def test_exchanges_with_uneven_rows(four):
    found = four.run(rank_work.exchange)
    counts, start = [0, 3, 2, 3], 0
    for rank, got in enumerate(found):
        assert got["sum"].tolist() == [10.0] * 5
        assert got["gather"][:, 0].tolist() == [r for r in range(4) for _ in range(counts[r])]
        assert got["scatter"][:, 0].tolist() == [10.0 * row for row in range(start, start + counts[rank])]
        assert got["to all"].tolist() == [source for source in range(4) for _ in range(rank)]
        start += counts[rank]


def test_send_and_receive(two):
    assert two.run(rank_work.pass_on)[1].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_every_way_of_the_timed_hand_over(two):
    """Each is checked where it arrives: a RankError names the way that brings other values."""
    ways = {"gloo, one exchange", "gloo, one message"}
    for seconds in two.run(comm.hand_over, preset("nano"), 150, 2):
        assert set(seconds) == ways and all(len(found) == 2 and min(found) > 0 for found in seconds.values())


def test_mismatched_plans(two):
    for message in two.run(rank_work.disagree):
        assert message == ("plan is 'EP2 DP1 TP2' on rank 1 and 'EP1 DP1 TP2' on rank 0; "
                           "all ranks must be given the same")


def test_wrong_world_size(two):
    assert two.run(rank_work.too_large) == ["EP1 DP1 TP8 has 8 ranks; 2 were started"] * 2


def test_logs_say_who(four):
    lines = four.logs().splitlines()
    assert [sum(line.startswith(f"[rank {r}] loaded") for line in lines) for r in range(4)].count(0) == 0


def gone(process_ids):
    """Whether these processes have ended, waiting a moment for it."""
    end = time.monotonic() + 5
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in process_ids):
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in process_ids)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(("function", "message"), [
    (rank_work.die, r"rank 1 ended with exit code -9 in die"),
    (rank_work.hang, r"rank 1 did not come: rank 0 waits in 'second', its exchange number 2, for more than 3 s"),
    (rank_work.complain, r"rank 1 failed with ValueError: these weights are odd in complain"),
])
def test_a_broken_rank_ends_the_group(function, message):
    """It is named, within a second (a hanging one: within the 3 s that it is waited for), and nothing is left."""
    ranks = Ranks(2, timeout=3)
    process_ids = ranks.run(rank_work.process_id)
    begin = time.monotonic()
    with pytest.raises(RankError, match=message) as error:
        ranks.run(function, 1)
    assert error.value.rank == 1 and time.monotonic() - begin < LIMIT
    assert gone(process_ids)
    assert function is not rank_work.complain or "[rank 1] ValueError: these weights are odd" in ranks.logs()
    with pytest.raises(RankError, match="these ranks have been ended"):
        ranks.run(rank_work.process_id)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_rank_that_nobody_waits_for_meets_the_deadline():
    ranks = Ranks(2, timeout=30)
    process_ids = ranks.run(rank_work.process_id)
    with pytest.raises(RankError, match=r"rank 1 did not finish sleep within 2 s; it has had no exchange yet"):
        ranks.run(rank_work.sleep, 1, timeout=2)
    assert gone(process_ids)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ranks_do_not_outlive_whoever_started_them():
    script = (f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
              "import rank_work\nfrom gptoss_lab.parallel import Ranks\n"
              "if __name__ == '__main__':\n"
              "    ranks = Ranks(2)\n"
              "    print(*ranks.run(rank_work.process_id), *ranks.run(rank_work.parent_id), flush=True)\n"
              "    os.kill(os.getpid(), 9)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9
    assert gone([int(pid) for pid in done.stdout.split()])


def test_ranks_have_the_environment_of_their_start(monkeypatch):
    """Also the second ones, which come from a server that is older."""
    for value in ("one", "two"):
        monkeypatch.setenv("OF_THE_START", value)
        with Ranks(1, "gloo") as ranks:
            assert ranks.run(rank_work.variable, "OF_THE_START") == [value]


def test_under_torchrun(folder, expected, tmp_path):
    """The same two ranks, started as they would be across nodes."""
    out = tmp_path / "tokens.json"
    greedy = [PROMPTS[0], PROMPTS[1]]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(Path(__file__).parent / "under_torchrun.py"), str(folder), "EP2 DP1 TP2", json.dumps(greedy), str(out)],
        capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [tuple(t) for t in json.loads(out.read_text())] == [tokens[:6] for tokens in expected[:2]]


def test_without_torchrun_the_error_says_so(monkeypatch):
    from gptoss_lab.parallel import from_torchrun

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError, match="start with torchrun"):
        from_torchrun()
