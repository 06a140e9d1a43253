"""The benches of the fast forward, run small on the CPU: what is checked, timed, written, left out, and resumed."""
import dataclasses
import json

import pytest
import torch

from gptoss_lab.bench import decode, fast_check, prefill
from gptoss_lab.bench.fast_model import Budget, Rows, Subject, centre_routers, expert_use, loaded
from gptoss_lab.checkpoint import synth
from gptoss_lab.checkpoint.synthetic import Synthetic
from gptoss_lab.cli import main
from gptoss_lab.config import preset
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.results import read_rows

TINY = dataclasses.replace(preset("nano").with_layers(2), name="tiny", num_experts=8, vocab_size=512,
                           max_position_embeddings=16384)


def subject(experts="fp8", projections="dense", config=TINY):
    return Subject(config, experts, projections, torch.device("cpu"))


@pytest.fixture(scope="module")
def weights():
    return loaded(subject())[0]


def test_loading_reports_what_it_took():
    weights, rows = loaded(subject("mxfp4", "fp8"))
    assert [row["metric"] for row in rows] == ["seconds", "bytes"] and all(row["suite"] == "load" for row in rows)
    of = rows[0]["conditions"]
    assert of["weight_bytes"] == weights.bytes and 0.01 < of["rounding"]["qkv"] < 0.04
    assert "random" in of["weights"] and "router" in of["weights"]


def test_prefill_rows_and_resuming(tmp_path, weights, capsys):
    out = tmp_path / "prefill.jsonl"
    cases = (prefill.Prompt(40), prefill.Prompt(20, 2))
    rows = prefill.run(subject(), out, cases, repetitions=2, weights=weights)
    assert [row["suite"] for row in rows] == ["accuracy", "prefill", "prefill"] == [r["suite"] for r in read_rows(out)]
    first = rows[1]
    assert len(first["raw"]) == 2 and first["bound"] == prefill.bound_seconds(subject(), cases[0])
    of = first["conditions"]
    assert (of["batch"], of["tokens"], of["layers"]) == (1, 40, 2)
    assert 1 <= of["experts_hit"] <= 8 and 0 < of["largest_share"] < 1 and of["backends"]["moe_layer"] == "reference"
    assert "40 tokens x 1" in capsys.readouterr().out
    again = prefill.run(subject(), out, (*cases, prefill.Prompt(10)), repetitions=1, checked=False, weights=weights)
    assert [row["conditions"]["tokens"] for row in again] == [10]
    assert prefill.run(subject(), out, cases) == []


def test_published_times_stand_beside_whole_models_alone():
    whole = subject(config=preset("gpt-oss-120b"))
    assert prefill.published(whole.config, prefill.Prompt(8192))["published_seconds"] == 0.364
    assert prefill.published(whole.config, prefill.Prompt(8192, 2)) == {}
    assert prefill.published(TINY, prefill.Prompt(8192)) == {}
    assert prefill.bound_seconds(dataclasses.replace(whole, projections="fp8"), prefill.Prompt(8192)) == pytest.approx(
        0.048, rel=0.05)


def test_a_budget_leaves_out_what_would_end_too_late(weights, capsys, monkeypatch):
    monkeypatch.setattr(prefill, "bound_seconds", lambda subject, case: case.tokens / 40)
    rows = prefill.run(subject(), None, (prefill.Prompt(20), prefill.Prompt(4000)), repetitions=1, seconds=1,
                       checked=False, weights=weights)
    assert [row["conditions"]["tokens"] for row in rows] == [20]
    assert "4000 tokens x 1" in capsys.readouterr().out
    assert Budget(None).left() == float("inf") and Budget(5).left() <= 5


def test_decode_rows(tmp_path, weights, capsys):
    out = tmp_path / "decode.jsonl"
    rows = decode.run(subject(), out, (decode.Batch(150, 1), decode.Batch(150, 3)), steps=2, weights=weights)
    assert [row["suite"] for row in rows] == ["accuracy", "decode", "decode"]
    of = rows[2]["conditions"]
    assert rows[2]["unit"] == "ms" and len(rows[2]["raw"]) == 2 and of["batch"] == 3 and of["replay_ms"] > 0
    assert of["attention"] == ["reference", "reference"] and of["capture_seconds"] > 0 and not of["cuda_graph"]
    assert of["experts_hit"] >= rows[1]["conditions"]["experts_hit"] == 4
    assert decode.run(subject(), out, (decode.Batch(150, 3),)) == []
    assert "batch 3 at 150" in capsys.readouterr().out


def test_decode_with_keys_and_values_in_e4m3(tmp_path, weights, capsys):
    """A case of its own in the same file, checked over such a pool; its bound has half the bytes of keys and values."""
    out, cases = tmp_path / "decode.jsonl", (decode.Batch(150, 2),)
    plain = decode.run(subject(), out, cases, steps=2, weights=weights)[-1]
    checked, row = decode.run(subject(), out, cases, steps=2, weights=weights, kv_form="fp8")
    assert checked["conditions"]["kv"] == row["conditions"]["kv"] == "float8_e4m3fn" != plain["conditions"]["kv"]
    assert row["case"] == "decode, keys and values in e4m3" and row["bound"] < plain["bound"]
    assert 0.2 < row["conditions"]["kv_bytes"] / plain["conditions"]["kv_bytes"] < 0.3       # against fp32
    assert checked["value"] == 1.0 and checked["conditions"]["median_relative_error"] < 1e-4
    assert row["conditions"]["attention"] == ["reference", "reference"] and "in e4m3" in capsys.readouterr().out
    assert decode.run(subject(), out, cases, kv_form="fp8") == [] and len(read_rows(out)) == 4


def test_decode_says_where_it_does_not_fit(weights, monkeypatch):
    monkeypatch.setattr(decode, "free_bytes", lambda device: decode.RESERVE + 10**6)
    row = decode.measure(subject(), weights, decode.Batch(8192, 128), 2)
    assert row["value"] is None and "GB of keys and values" in row["conditions"]["failed"] and row["bound"] > 0
    assert " - " in decode.line(row)


@pytest.mark.parametrize(("experts", "projections"), [("fp8", "fp8"), ("mxfp4", "dense")])
def test_the_check_passes_and_says_how_near(experts, projections):
    one = subject(experts, projections)
    row = fast_check.check(one, loaded(one)[0])
    assert row["value"] == 1.0 and row["conditions"]["clear_rows"] > 100
    assert row["conditions"]["median_relative_error"] < 1e-5


def test_the_check_finds_a_wrong_sink_and_a_wrong_bias(weights, monkeypatch):
    """The fast forward computes with other weights than the plain one sees: nothing may be timed."""
    plain = fast_check.LaidOut
    for change in ({"sinks": weights.layers[0].sinks + 1},
                   {"out": weights.layers[0].out._replace(bias=weights.layers[0].out.bias + 0.1)}):
        layers = (dataclasses.replace(weights.layers[0], **change), *weights.layers[1:])
        other = dataclasses.replace(weights, layers=layers)
        monkeypatch.setattr(fast_check, "LaidOut", lambda few, other=other: plain(other))
        with pytest.raises(fast_check.WrongResult, match="relative error"):
            fast_check.check(subject(), weights)


def test_expert_use_of_a_router_that_always_takes_the_same(weights):
    model = FastTransformer(weights, make_pool(weights, tokens=64, sequences=1))
    ids = torch.arange(20)
    even = expert_use(model, lambda look: model(ids, observe=look))
    for layer in weights.layers:
        assert layer.moe.router_bias.shape == (8,)
    bias = torch.tensor([9.0, 9, 9, 9, -9, -9, -9, -9])
    layers = tuple(dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, router_bias=bias))
                   for layer in weights.layers)
    skewed = FastTransformer(dataclasses.replace(weights, layers=layers), make_pool(weights, tokens=64, sequences=1))
    assert expert_use(skewed, lambda look: skewed(ids, observe=look)) == {"experts_hit": 4.0, "largest_share": 0.25}
    assert even["experts_hit"] > 4


def test_random_routers_are_centred():
    """Eight layers of 32 experts: before, tokens agree on favourites; after, none gets much more than its share."""
    config = dataclasses.replace(TINY.with_layers(8), num_experts=32)
    weights = lay_out(Synthetic(config), torch.device("cpu"), torch.float32, experts="dense")
    model, ids = FastTransformer(weights, make_pool(weights, tokens=600, sequences=1)), torch.arange(512)
    before = expert_use(model, lambda look: model(ids, observe=look))["largest_share"]
    centre_routers(weights, 512)
    after = expert_use(model, lambda look: model(ids, observe=look))
    assert after["largest_share"] < min(before, 2.0 / 32) and after["experts_hit"] == 32


def test_rows_that_failed_are_measured_again(tmp_path, weights, monkeypatch):
    out = tmp_path / "decode.jsonl"
    monkeypatch.setattr(decode, "free_bytes", lambda device: 0)
    decode.run(subject(), out, (decode.Batch(64, 1),), checked=False, weights=weights)
    assert not Rows(out).has("decode", decode.CASE, subject(), batch=1, tokens=64)


def test_commands(tmp_path, capsys):
    """Arguments, tables and rows of the three commands, with a checkpoint of one layer."""
    folder = synth(TINY.with_layers(1), tmp_path / "model")
    common = ["--checkpoint", str(folder), "--device", "cpu", "--tokens", "24"]
    assert main(["bench", "prefill", *common, "--batch", "2", "--repetitions", "1", "--out",
                 str(tmp_path / "p.jsonl")]) == 0
    for more in ([], ["--kv", "fp8"]):
        assert main(["bench", "decode", *common, "--experts", "mxfp4", "--steps", "1", "--no-check", *more, "--out",
                     str(tmp_path / "d.jsonl")]) == 0
    assert main(["profile", *common, "--phase", "decode", "--out", str(tmp_path / "f.jsonl"), "--trace",
                 str(tmp_path / "t.json")]) == 0
    assert "no kernel running" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {row["suite"] for row in read_rows(tmp_path)} == {"load", "accuracy", "prefill", "decode", "profile"}
    assert main(["bench", "prefill", "--checkpoint", str(folder), "--layers", "1"]) == 2
    assert main(["profile", "--model", "nano", "--phase", "sleep"]) == 2
