"""What `observe` reports, against the same quantities computed another way; and that looking changes nothing."""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_lab.model import Recorder, build_model

CONFIG = config()
COUNT = 20


@pytest.fixture(scope="module")
def model():
    return build_model(random_source(CONFIG), dtype=torch.float64)


@pytest.fixture(scope="module")
def seen(model):
    recorder = Recorder()
    model(tokens(CONFIG, COUNT), observe=recorder)
    return recorder


def test_shapes(seen):
    shapes = {name: tuple(seen.stacked(name).shape) for name in seen.values}
    assert shapes == {
        "hidden_norm": (5, COUNT), "sink_mass": (4, COUNT, 6), "router_logits": (4, COUNT, 5),
        "router_ids": (4, COUNT, 3), "router_weights": (4, COUNT, 3),
    }


def test_looking_changes_nothing(model):
    ids = tokens(CONFIG, COUNT)
    assert torch.equal(model(ids, observe=Recorder()), model(ids))


def test_sink_mass_is_the_rest_of_the_attention(model, seen):
    """With values of one a head's output is 1 - sink mass. Checked on layer 0: its input is the embedding."""
    block = model.layers[0]
    x = block.attention_norm(model.embedding(tokens(CONFIG, COUNT)).double())
    qkv = block.attention.qkv(x).view(COUNT, 10, 32)
    cos, sin = (t.double() for t in model.rope(torch.arange(COUNT)))
    half = torch.cat([qkv[..., :16] * cos[:, None] - qkv[..., 16:] * sin[:, None],
                      qkv[..., 16:] * cos[:, None] + qkv[..., :16] * sin[:, None]], dim=-1)
    for head in range(6):
        z = half[:, head] @ half[:, 6 + head // 3].T * 32**-0.5
        mask = torch.ones(COUNT, COUNT, dtype=torch.bool).tril() & ~torch.ones(COUNT, COUNT, dtype=torch.bool).tril(-7)
        row = torch.cat([z.masked_fill(~mask, -torch.inf), block.attention.sinks[head].expand(COUNT, 1)], dim=1)
        assert distance(seen.stacked("sink_mass")[0, :, head], row.softmax(dim=1)[:, -1]) <= 1e-12


def test_router_is_consistent(seen):
    logits, ids, weights = (seen.stacked(f"router_{x}") for x in ("logits", "ids", "weights"))
    top, best = logits.topk(3, dim=-1)
    assert torch.equal(ids, best) and distance(weights, top.softmax(-1)) <= 1e-14


def test_hidden_norm_of_the_embedding(model, seen):
    x = model.embedding(tokens(CONFIG, COUNT)).double()
    assert distance(seen.stacked("hidden_norm")[0], x.norm(dim=-1) / 96**0.5) <= 1e-14


def test_steps_are_joined_along_the_tokens(model, seen):
    recorder, cache = Recorder("router_ids", "sink_mass"), model.new_cache()
    for part in tokens(CONFIG, COUNT).split(6):
        model(part, caches=[cache], observe=recorder)
    assert set(recorder.values) == {"router_ids", "sink_mass"}
    assert torch.equal(recorder.stacked("router_ids"), seen.stacked("router_ids"))
    assert distance(recorder.stacked("sink_mass"), seen.stacked("sink_mass")) <= 1e-12


def test_unknown_name(seen):
    with pytest.raises(KeyError, match="nothing was recorded as 'heads'; there is hidden_norm, router_ids"):
        seen.stacked("heads")
