"""A served loop with a page pool: small requests share it, one that can never fit is refused with numbers."""
import dataclasses

import pytest

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.engine import PromptError, SamplingParams
from gptoss_lab.serve import load_loop


def test_positions_are_pages(tmp_path):
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, eos_token_ids=(3,), pad_token_id=0)
    synth(config, tmp_path / "model")
    loop = load_loop(tmp_path / "model", "cpu", "float32", 4, 200)
    sampling = SamplingParams(temperature=0, max_new_tokens=100, stop_ids=())
    with pytest.raises(PromptError, match="prompt 1 may come to hold 299 positions, 5 pages of 64; the caches have 4"):
        loop.submit(1, [1] * 200, sampling)
    for sequence in range(4):
        loop.submit(sequence, [sequence] * 60, sampling)
    found = dict.fromkeys(range(4), 0)
    while not loop.idle:
        for event in loop.step():
            found[event.sequence] += 1
    assert set(found.values()) == {100} and loop.scheduler.preemptions > 0


def test_the_fast_model_serves_the_plain_models_tokens(tmp_path):
    """Forced on the CPU, its pool too small for all at once: the same greedy tokens, and one line that says so."""
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, eos_token_ids=(3,), pad_token_id=0)
    synth(config, tmp_path / "model")
    sampling, found, said = SamplingParams(temperature=0, max_new_tokens=100, stop_ids=()), [], []
    for forward in ("plain", "fast"):
        loop = load_loop(tmp_path / "model", "cpu", "float32", 4, 200, forward=forward, say=said.append)
        tokens = {sequence: [] for sequence in range(6)}
        for sequence in tokens:
            loop.submit(sequence, [sequence] * 60, sampling)
        while not loop.idle:
            for event in loop.step():
                tokens[event.sequence].append(event.token)
        found.append(tokens)
    assert found[0] == found[1] and loop.scheduler.preemptions > 0
    assert said[0] == "plain model: as asked for" and said[1].startswith("fast model: as asked for")
    with pytest.raises(PromptError, match="pages in all"):
        loop.submit(9, [1] * 600, sampling)
