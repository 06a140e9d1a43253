"""Decode steps captured for a batch size and replayed for others' requests: nothing of an earlier batch may be seen.

On the CPU a "replay" runs the captured function over the same fixed buffers, so what is tested is what a graph sees.
"""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_kernels.registry import BackendUnavailable
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.model.fast.decode import DecodeStep
from gptoss_lab.model.load import build_model

EXACT = 1e-5


@pytest.fixture(scope="module")
def weights():
    return lay_out(random_source(config(max_position_embeddings=4096)), "cpu", torch.float32, experts="dense")


@pytest.fixture(scope="module")
def plain():
    return build_model(random_source(config(max_position_embeddings=4096)), dtype=torch.float32)


def model_of(weights, sizes=(8,), **more):
    return FastTransformer(weights, make_pool(weights, tokens=600, sequences=12, page_size=4), sizes=sizes, **more)


def started(model, lengths, seed):
    """Caches with prompts of these lengths read, and the ids fed next."""
    caches = [model.new_cache() for _ in lengths]
    for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        model(tokens(model.config, length, seed + row), [length], [cache], logits="none")
    return caches, tokens(model.config, len(lengths), seed + 100)


def test_two_replays_with_other_requests_equal_eager(weights):
    """Case P26: captured at 8, replayed with 5 requests, with 8, with 5 others, in pages that the first ones had."""
    graphed, eager = model_of(weights), model_of(weights, graphs=False)
    for seed, lengths in ((1, (3, 9, 30, 7, 12)), (2, (5, 1, 8, 8, 20, 6, 13, 40)), (3, (11, 2, 6, 33, 4))):
        batches = [started(model, lengths, seed) for model in (graphed, eager)]
        for _ in range(3):
            a, b = (model(ids, [1] * len(ids), caches) for model, (caches, ids) in
                    zip((graphed, eager), batches, strict=True))
            assert distance(a, b) <= EXACT
        for caches, _ in batches:
            for cache in reversed(caches):
                cache.release()
    assert list(graphed._decode.captured) == [8]


def test_spare_rows_write_to_page_and_ring_0_alone(weights):
    model = model_of(weights)
    caches, ids = started(model, (5, 17, 6), 1)
    before = [pages.clone() for pages in model.pool.keys]
    model(ids, [1, 1, 1], caches)
    for n, (old, now) in enumerate(zip(before, model.pool.keys, strict=True)):
        changed = set((old != now).flatten(1).any(dim=1).nonzero().flatten().tolist())
        own = {(cache.ring[at // 4 % len(cache.ring)] if model.config.is_sliding(n) else cache.pages[at // 4])
               for cache, at in zip(caches, (5, 17, 6), strict=True)}
        assert own <= changed <= own | {0}


def test_what_spare_rows_hold_matters_to_nobody(weights):
    """Page 0 and ring 0 full of NaN: the real rows stay finite and the same bits."""
    results = []
    for poison in (0.0, torch.nan):
        model = model_of(weights)
        model.capture()
        for pages in (*model.pool.keys, *model.pool.values):
            pages[: model.pool.ring_pages].fill_(poison)
        caches, ids = started(model, (5, 17, 6), 1)
        results.append(torch.stack([model(ids, [1, 1, 1], caches) for _ in range(2)]))
    assert torch.isfinite(results[0]).all() and torch.equal(*results)


def test_the_router_is_told_which_rows_are_real(weights):
    model, seen = model_of(weights), []
    inner = model._forward._moe
    model._forward._moe = lambda x, moe, num_tokens, norm: seen.append((len(x), num_tokens.tolist())) or inner(
        x, moe, num_tokens=num_tokens, norm=norm)
    caches, ids = started_alone(model, 3)
    seen.clear()
    model(ids, [1, 1, 1], caches)
    model(ids[:2], [1, 1], caches[:2])
    assert seen[-8:] == [(8, [3])] * 4 + [(8, [2])] * 4


def started_alone(model, count):
    """Empty caches: the first token of each is decoded."""
    return [model.new_cache() for _ in range(count)], tokens(model.config, count, 7)


def test_decode_from_nothing(weights, plain):
    model = model_of(weights)
    caches, ids = started_alone(model, 3)
    assert distance(model(ids, [1, 1, 1], caches), plain(ids, [1, 1, 1])) <= EXACT


def test_a_cache_that_was_cut_and_a_table_of_its_new_pages(weights):
    """truncate gives pages back, another sequence takes them, and the first grows into other pages."""
    model, eager = model_of(weights, sizes=(2,)), model_of(weights, graphs=False)
    results = []
    for m in (model, eager):
        caches, ids = started(m, (4, 5), 3)
        m(ids, [1, 1], caches)
        caches[0].truncate(3)
        caches[1].reserve(9)
        results.append(torch.stack([m(ids, [1, 1], caches) for _ in range(6)]))
    assert distance(*results) <= EXACT


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("start", [0, 3, 6, 7, 11, 12, 25])
def test_steps_of_a_few_tokens_each_are_decode(weights, plain, monkeypatch, graphs, start):
    """As verifying needs them: ragged counts up to a draft of 3 and one more, before, at and beyond a full ring, some
    taken back, every row's logits those of one plain pass."""
    pool = make_pool(weights, tokens=600, sequences=3, page_size=4, draft=3)
    model = FastTransformer(weights, pool, sizes=(4, 16), graphs=graphs)
    rows = [tokens(weights.config, start + n + 16, seed) for seed, n in enumerate((4, 1, 9))]
    whole = [plain(row, logits="all") for row in rows]
    caches, at = [model.new_cache() for _ in rows], [start + n - 1 for n in (4, 1, 9)]
    for row, cache, length in zip(rows, caches, at, strict=True):
        if length:
            model(row[:length], [length], [cache], logits="none")
    monkeypatch.setattr(model, "_prefilled", None)
    for counts, kept, logits in (((4, 1, 3), (2, 1, 3), "all"), ((1, 4, 4), (1, 1, 2), "last"), ((2, 2, 2),) * 2 +
                                 ("all",), ((1, 1, 1),) * 2 + ("last",), ((4, 4, 4), (1, 4, 2), "all")):
        got = model(torch.cat([row[a : a + n] for row, a, n in zip(rows, at, counts, strict=True)]), counts, caches,
                    logits=logits)
        first = [0] * 3 if logits == "all" else [n - 1 for n in counts]
        want = torch.cat([one[a + f : a + n] for one, a, f, n in zip(whole, at, first, counts, strict=True)])
        assert distance(got, want) <= EXACT
        at = [a + n for a, n in zip(at, kept, strict=True)]
        for cache, length in zip(caches, at, strict=True):
            cache.truncate(length)
    assert not graphs or set(model._decode.captured) == {4, 16}


def test_more_tokens_than_a_draft_or_a_size_are_prefill(weights):
    model = FastTransformer(weights, make_pool(weights, tokens=600, sequences=3, page_size=4, draft=1), sizes=(4,),
                            max_kv_len=30)
    caches, ids = [model.new_cache() for _ in range(3)], tokens(weights.config, 40)
    for counts in ([3, 1, 1], [2, 2, 2], [25, 1, 1]):
        model(ids[: sum(counts)], counts, caches)
    assert not model._decode.captured
    model(ids[:4], [2, 1, 1], caches, logits="none")
    model(ids[:3], [1, 1, 1], caches, observe=lambda *_: None)
    assert not model._decode.captured and max(cache.length for cache in caches) == 33
    for cache in caches[1:]:
        model(ids[:2], [2], [cache])
    model(ids[:2], [2], caches[:1])                                      # beyond the tables
    assert list(model._decode.captured) == [4] and caches[0].length == 35


def test_rows_are_copied_out_of_the_fixed_buffers(weights):
    model = model_of(weights)
    caches, ids = started(model, (4, 9), 1)
    first, state = model(ids, [1, 1], caches, hidden=True)
    kept = first.clone(), state.clone()
    model(ids, [1, 1], caches)
    assert torch.equal(first, kept[0]) and torch.equal(state, kept[1])
    assert distance(torch.nn.functional.linear(state, weights.unembedding), first) <= EXACT


def test_sizes_and_reports(weights):
    model = model_of(weights, sizes=(1, 4))
    assert [model._decode.size_for(n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 16]
    reports = model.capture()
    assert [r.decode.batch for r in reports] == [4, 1] and all(r.seconds > 0 and r.bytes == 0 for r in reports)
    caches, ids = started(model, (3,) * 6, 1)
    eager = model_of(weights, graphs=False)
    others, _ = started(eager, (3,) * 6, 1)
    assert distance(model(ids, [1] * 6, caches), eager(ids, [1] * 6, others)) <= EXACT
    with pytest.raises(ValueError, match="sizes"):
        model_of(weights, sizes=())


def test_steps_that_do_not_fit(weights):
    model = model_of(weights, max_kv_len=8)
    cache = model.new_cache()
    model(tokens(model.config, 8), [8], [cache], logits="none")
    with pytest.raises(ValueError, match="9 tokens does not fit"):
        model(tokens(model.config, 1), [1], [cache])
    step = DecodeStep(model.pool, 2, 8, 6, model.operations, None)
    with pytest.raises(ValueError, match="for a step of 2 rows"):
        step.fill(tokens(model.config, 3), [cache] * 3)
    with pytest.raises(BackendUnavailable, match="no operation 'attention'"):
        model_of(weights, backends={"attention": "reference"})
    with pytest.raises(ValueError, match="rings of this model's pool"):
        model.new_cache(draft=2)
