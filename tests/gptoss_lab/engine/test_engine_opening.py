"""Which model an engine gets: the choice with its reason, the pool that comes with it, and the same greedy tokens."""
import dataclasses
import importlib.util

import pytest
import torch

from gptoss_lab.checkpoint import ensure_nano, open_checkpoint, synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, SamplingParams, opening
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.opening import choose_forward, decode_sizes, open_model
from gptoss_lab.harmony import render, system, user
from gptoss_lab.model import Transformer
from gptoss_lab.model.fast import FastTransformer

CPU = torch.device("cpu")
QUESTION = render([system("low", "2025-06-28"), user("What is 37 + 48?")])
SMALL = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=128, intermediate_size=128, num_heads=4,
                            num_kv_heads=4, head_dim=32, vocab_size=50, eos_token_ids=(3,), pad_token_id=0,
                            max_position_embeddings=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synth(SMALL, tmp_path_factory.mktemp("opening") / "model")


def test_the_choice_and_its_reason(monkeypatch):
    assert choose_forward(CPU) == (False, "the device is cpu, the fast one is for Hopper GPUs")
    assert choose_forward(CPU, "fast") == (True, "as asked for") and not choose_forward(CPU, "plain")[0]
    gpu = torch.device("cuda", 1)
    for capability, fast, why in (((9, 0), True, "cuda:1 is a Hopper GPU"),
                                  ((8, 0), False, "cuda:1 has compute capability 8.0, not Hopper's 9.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, now=capability: now)
        assert choose_forward(gpu) == (fast, why) and choose_forward(gpu, "plain") == (False, "as asked for")
    with pytest.raises(ValueError, match="forward is 'quick'; one of auto, plain, fast"):
        choose_forward(CPU, "quick")


def test_without_triton_it_is_plain(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_forward(torch.device("cuda")) == (False, "triton is not installed")
    with pytest.raises(RuntimeError, match="the fast model needs triton"):
        choose_forward(CPU, "fast")


def test_plain_and_fast_with_what_they_say(folder):
    plain, fast = (open_model(folder, "cpu", torch.float32, forward=forward, sequences=3, positions=500, draft=2)
                   for forward in ("auto", "fast"))
    assert isinstance(plain.model, Transformer) and not plain.fast
    assert plain.said == "plain model: the device is cpu, the fast one is for Hopper GPUs"
    assert isinstance(fast.model, FastTransformer) and fast.fast and "\n" not in fast.said
    assert "fast model: as asked for; dense experts, dense projections, pages for 500 tokens" in fast.said
    pool = fast.model.pool
    assert (pool.rings, pool.draft, pool.pages) == (4, 2, -(-500 // 64) + 3 + 1)
    assert fast.model._decode.sizes == (1, 2, 4, 8, 16)                  # 3 sequences of 3 rows


def test_sizes():
    assert [decode_sizes(n) for n in (1, 2, 5)] == [(1,), (1, 2), (1, 2, 4, 8)]
    assert decode_sizes(64)[-1] == 64 and decode_sizes(300)[-1] == 128


def test_pools_are_as_large_as_memory_allows(folder, monkeypatch):
    """The bytes of the pool stay within what there is, and one page for each sequence more would not."""
    one = SMALL.max_position_embeddings
    assert open_model(folder, forward="fast", sequences=2).model.pool.pages == 2 * one // 64 + 2 + 1
    monkeypatch.setattr(opening, "CPU_BYTES", 1_500_000)
    model = open_model(folder, forward="fast", sequences=2).model
    page = 64 * 2 * 4 * 32 * 2                                           # one layer of two is full; bf16
    assert 1_500_000 - 3 * page < model.pool.bytes <= 1_500_000
    with pytest.raises(ValueError, match=r"keys and values of 9,000 tokens of 2 sequences do not fit: .* room for "
                                         r"[\d,]+ tokens; ask for fewer at once"):
        open_model(folder, forward="fast", sequences=2, positions=9000)
    monkeypatch.setattr(opening, "CPU_BYTES", 10_000)
    with pytest.raises(ValueError, match="keys and values of 2 sequences do not fit: .* room for 0 tokens"):
        open_model(folder, forward="fast", sequences=2)


def test_weights_stay_in_the_form_of_the_checkpoint(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "DENSE_LIMIT", 0)
    fp8 = convert(folder, tmp_path / "fp8").path
    both = convert(folder, tmp_path / "both", attention_fp8=True).path
    parts = convert(synth(dataclasses.replace(SMALL, num_kv_heads=2), tmp_path / "parts"), tmp_path / "fp8 parts",
                    attention_fp8=True).path                             # K has 64 rows: half a block
    for path, experts, projections in ((folder, "mxfp4", "dense"), (fp8, "fp8", "dense"), (both, "fp8", "fp8"),
                                       (parts, "fp8", "dense")):
        weights = open_model(path, "cpu", torch.float32, forward="fast", positions=64).model.weights
        assert (weights.experts, weights.projections, weights.rounding) == (experts, projections, {})
    assert opening._expert_form(open_checkpoint(folder), torch.device("cuda")) == "mxfp4"


@pytest.mark.parametrize("which", ["small", "nano"])
def test_the_fast_model_finds_the_plain_models_tokens(folder, which):
    path, prompts = (folder, [[1, 2, 3] * 50, [4], [7, 8] * 40]) if which == "small" else (ensure_nano(), [QUESTION])
    greedy, found = SamplingParams(temperature=0, max_new_tokens=20, stop_ids=()), []
    for forward in ("plain", "fast"):
        model = open_model(path, "cpu", torch.float32, forward=forward, sequences=3, positions=400).model
        found.append([c.tokens for c in Engine(model, PlainDecoder(model, 33)).complete(prompts, greedy)])
    assert found[0] == found[1]
