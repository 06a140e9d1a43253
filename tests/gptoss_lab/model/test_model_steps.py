"""One pass, chunks, token by token, alone or in a ragged batch: the same logits, to 1e-12 in fp64."""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_lab.model.load import build_model

EXACT = 1e-12
LENGTH = 61


@pytest.fixture(scope="module")
def model():
    return build_model(random_source(config()), dtype=torch.float64)


@pytest.fixture(scope="module")
def ids(model):
    return tokens(model.config, LENGTH)


@pytest.fixture(scope="module")
def whole(model, ids):
    return model(ids, logits="all")


def in_chunks(model, ids, sizes, capacity=4):
    cache = model.new_cache(capacity)
    parts = [model(part, caches=[cache], logits="all") for part in ids.split(sizes)]
    return torch.cat(parts), cache


@pytest.mark.parametrize(
    "sizes", [[LENGTH], [1] * LENGTH, [5, 56], [6, 7, 8, 40], [7, 54], [30, 1, 1, 1, 28], [60, 1]], ids=str
)
def test_chunks_equal_one_pass(model, ids, whole, sizes):
    """Chunks shorter than, as long as, and longer than the window of 7."""
    got, cache = in_chunks(model, ids, sizes)
    assert distance(got, whole) <= EXACT
    assert cache.length == LENGTH


def test_chunks_equal_one_pass_fp32(ids):
    model = build_model(random_source(config()), dtype=torch.float32)
    got, _ = in_chunks(model, ids, [20, 20] + [1] * 21)
    assert distance(got, model(ids, logits="all")) <= 1e-5


def test_ragged_batch_equals_each_alone(model):
    """Three sequences with histories of 0, 9 and 30 tokens take 12, 1 and 5 more in one step, then one each."""
    rows = [tokens(model.config, n, seed) for seed, n in enumerate((13, 11, 36))]
    alone = [model(row, logits="all") for row in rows]
    caches = [model.new_cache() for _ in rows]
    model(torch.cat([rows[1][:9], rows[2][:30]]), [9, 30], caches[1:], logits="none")
    both = model(torch.cat([rows[0][:12], rows[1][9:10], rows[2][30:35]]), [12, 1, 5], caches, logits="all")
    expected = torch.cat([alone[0][:12], alone[1][9:10], alone[2][30:35]])
    assert distance(both, expected) <= EXACT
    last = model(torch.stack([row[-1] for row in rows]), [1, 1, 1], caches)
    assert distance(last, torch.stack([one[-1] for one in alone])) <= EXACT
    assert [cache.length for cache in caches] == [13, 11, 36]


def test_ragged_single_pass_without_caches(model):
    rows = [tokens(model.config, n, seed) for seed, n in enumerate((13, 1, 30))]
    got = model(torch.cat(rows), [13, 1, 30], logits="all")
    assert distance(got, torch.cat([model(row, logits="all") for row in rows])) <= EXACT


def test_which_logits(model, ids, whole):
    last, both = model(ids), model(ids, [20, 41])
    assert last.shape == (1, 131) and both.shape == (2, 131)
    assert distance(last, whole[-1:]) <= EXACT
    assert distance(both, model(ids, [20, 41], logits="all")[[19, 60]]) <= EXACT
    assert model(ids, logits="none") is None


def test_cache_keeps_the_window_only(model, ids):
    """A sliding layer holds window - 1 rows, and its memory is no larger; a full layer holds every row."""
    for sizes in ([LENGTH], [1] * LENGTH, [50, 11]):
        _, cache = in_chunks(model, ids, sizes)
        for n, layer in enumerate(cache.layers):
            rows = 6 if model.config.is_sliding(n) else LENGTH
            assert layer.keys.shape == layer.values.shape == (rows, 2, 32)
            if rows == 6:
                assert layer.keys.untyped_storage().nbytes() <= 7 * 2 * 32 * 8
        assert cache.bytes == 2 * (2 * 6 + 2 * LENGTH) * 2 * 32 * 8


def test_cache_bytes_of_the_released_model():
    """20b in bf16: 24,576 bytes per token in the full layers, 127 rows of 24,576 in the sliding ones."""
    from gptoss_lab.config import preset
    from gptoss_lab.model import SequenceCache

    cache = SequenceCache(preset("gpt-oss-20b"), torch.bfloat16, "cpu")
    rows = torch.zeros(300, 8, 64, dtype=torch.bfloat16)
    for layer in cache.layers:
        layer.extend(rows, rows)
    cache.commit(300)
    assert cache.bytes == 300 * 24_576 + 127 * 24_576


def test_a_step_that_raises_changes_nothing(model, ids, whole):
    """A failure in the last layer leaves the cache as it was: the same step again gives the right logits."""
    _, cache = in_chunks(model, ids[:30], [30])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def fail(what, layer, value):
        if what == "router_ids" and layer == 3:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        model(ids[30:50], caches=[cache], observe=fail)
    assert cache.length == 30
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert distance(model(ids[30:], caches=[cache], logits="all"), whole[30:]) <= EXACT


@pytest.mark.parametrize(
    "count, lengths, words",
    [
        (5, [3, 3], "lengths are [3, 3]; each must be at least 1 and all together 5"),
        (3, [3, 0], "lengths are [3, 0]"),
        (0, [], "lengths are []"),
        (0, None, "lengths are [0]"),
    ],
)
def test_wrong_lengths(model, ids, count, lengths, words):
    with pytest.raises(ValueError) as error:
        model(ids[:count], lengths)
    assert words in str(error.value)


def test_wrong_calls(model, ids):
    cache = model.new_cache()
    with pytest.raises(ValueError, match="2 lengths but 1 caches"):
        model(ids[:4], [2, 2], [cache])
    with pytest.raises(ValueError, match="the same cache"):
        model(ids[:4], [2, 2], [cache, cache])
    with pytest.raises(ValueError, match="one flat row"):
        model(ids[None])
    with pytest.raises(ValueError, match="logits is 'first'"):
        model(ids, logits="first")
    assert cache.length == 0


def test_model_length():
    short = build_model(random_source(config(num_layers=1, max_position_embeddings=10)), dtype=torch.float32)
    cache = short.new_cache()
    short(torch.arange(10), caches=[cache])
    with pytest.raises(ValueError, match="would have 11 tokens; the model's length is 10"):
        short(torch.arange(1), caches=[cache])
