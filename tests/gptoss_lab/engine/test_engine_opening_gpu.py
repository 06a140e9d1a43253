"""On a Hopper GPU: the fast model is taken, its pool fills what is free, and the largest steps still run beside it."""
import dataclasses

import pytest
import torch

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.engine.opening import open_model
from gptoss_lab.serve import load_loop

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the CPU tests stand alone"),
]
CONFIG = dataclasses.replace(preset("gpt-oss-20b").with_layers(4), vocab_size=4096, num_experts=8, pad_token_id=0,
                             eos_token_ids=(3,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synth(CONFIG, tmp_path_factory.mktemp("opening") / "model")


def test_a_full_pool_leaves_room_for_the_largest_steps(folder):
    """So many sequences that they could hold more than there is: only memory bounds the pool."""
    opened = open_model(folder, "cuda", sequences=512, draft=1, step_tokens=8192, capture=True)
    assert opened.fast and "Hopper" in opened.said and "mxfp4 experts" in opened.said
    model, total = opened.model, torch.cuda.get_device_properties(0).total_memory
    assert model.pool.bytes > 0.7 * total
    cache = model.new_cache()
    ids = torch.arange(8192, device="cuda") % CONFIG.vocab_size
    for _ in range(2):
        logits = model(ids, [8192], [cache])
    caches = [model.new_cache() for _ in range(64)]
    steps = model(ids[:128], [2] * 64, caches, logits="all")
    assert torch.isfinite(logits).all() and torch.isfinite(steps).all()
    assert set(model._decode.captured) == {1, 2, 4, 8, 16, 32, 64, 128}
    assert torch.cuda.mem_get_info()[0] < 0.2 * total


def test_more_than_there_is_is_refused_with_numbers(folder):
    with pytest.raises(ValueError, match=r"900,000,000 tokens of 4 sequences do not fit.*room for [\d,]+ tokens"):
        open_model(folder, "cuda", sequences=4, positions=900_000_000)


def test_a_served_loop_is_fast(folder):
    said = []
    loop = load_loop(folder, "cuda", max_batch=8, max_positions=10_000, say=said.append)
    for sequence in range(8):
        loop.submit(sequence, [sequence] * 600)
    events = []
    while not loop.idle:
        events += loop.step()
    assert {event.sequence for event in events} == set(range(8)) and said[0].startswith("fast model: cuda is a Hopper")
