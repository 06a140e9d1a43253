"""The paged cache: the same logits as the plain one to the bit, exact bytes, borders, roll-back, who holds what."""
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import config, distance, random_source, tokens

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.config import preset
from gptoss_lab.model import SequenceCache, build_model, load_model
from gptoss_lab.model.paged import CacheFull, PagePool

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(scope="module")
def model():
    return build_model(random_source(config()), dtype=torch.float32)


@pytest.fixture(scope="module")
def wide():
    """The released window of 128 in two small layers."""
    c = config(num_layers=2, hidden_size=32, intermediate_size=32, num_experts=3, experts_per_token=2, num_heads=2,
               num_kv_heads=1, sliding_window=128)
    return build_model(random_source(c), dtype=torch.float32)


def pool_for(model, pages=64, rings=5, **changes):
    return PagePool(model.config, pages=pages, rings=rings, **{"page_size": 4, **CPU, **changes})


@torch.inference_mode()
def run(model, ids, sizes, cache):
    """All logits of `ids` fed in chunks of `sizes`."""
    return torch.cat([model(part, caches=[cache], logits="all") for part in ids.split(sizes)])


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
@pytest.mark.parametrize("sizes", [[61], [1] * 61, [5, 56], [6, 7, 8, 40], [4, 4, 53], [60, 1]], ids=str)
def test_the_same_bits_as_the_plain_cache(model, page_size, sizes):
    ids = tokens(model.config, 61)
    plain = run(model, ids, sizes, model.new_cache())
    paged = run(model, ids, sizes, pool_for(model, page_size=page_size).new_cache())
    assert torch.equal(paged, plain)


@pytest.mark.parametrize("chunk", [127, 128, 129])
@pytest.mark.parametrize("page_size", [16, 64, 127])
def test_chunk_borders_at_the_window_of_128(wide, chunk, page_size):
    """Chunks one shorter than, as long as, and one longer than the window, then token by token over the border."""
    ids = tokens(wide.config, 2 * chunk + 5)
    sizes = [chunk, chunk, 1, 1, 1, 1, 1]
    paged = run(wide, ids, sizes, pool_for(wide, page_size=page_size).new_cache())
    assert torch.equal(paged, run(wide, ids, sizes, wide.new_cache()))
    with torch.inference_mode():
        assert distance(paged, wide(ids, logits="all")) <= 1e-5


@pytest.mark.parametrize("length", [127, 128, 129])
def test_one_prompt_up_to_the_window_then_decode(wide, length):
    ids = tokens(wide.config, length + 3, seed=length)
    sizes = [length, 1, 1, 1]
    paged = run(wide, ids, sizes, pool_for(wide, page_size=64).new_cache())
    assert torch.equal(paged, run(wide, ids, sizes, wide.new_cache()))


def test_a_ragged_batch_whose_pages_lie_among_each_other(model):
    """Three sequences take pages in turn; each gets the bits of the plain caches in the same batch."""
    rows = [tokens(model.config, 30, seed) for seed in range(3)]
    pool = pool_for(model)
    ours, plain = [pool.new_cache() for _ in rows], [model.new_cache() for _ in rows]
    with torch.inference_mode():
        for start, stop in ((0, 9), (9, 10), (10, 26), (26, 30)):
            ids, lengths = torch.cat([row[start:stop] for row in rows]), [stop - start] * 3
            assert torch.equal(model(ids, lengths, ours), model(ids, lengths, plain))
    held = [set(cache.pages) for cache in ours]
    assert not (held[0] & held[1] or held[1] & held[2] or held[0] & held[2]) and 0 not in set.union(*held)


@pytest.mark.parametrize("path", ["tiny", "nano"])
def test_checkpoints_give_the_same_bits(path):
    loaded = load_model(TINY / "hf" if path == "tiny" else ensure_nano(), dtype=torch.float32)
    ids = tokens(dataclasses.replace(loaded.config, vocab_size=300), 40)
    sizes = [9, 17, 1, 1, 12]
    cache = pool_for(loaded, pages=12).new_cache()
    assert torch.equal(run(loaded, ids, sizes, cache), run(loaded, ids, sizes, loaded.new_cache()))


@pytest.mark.parametrize(("length", "wanted"), [
    (1, 73_728), (128, 9_437_184), (129, 9_474_048), (131_072, 4_836_556_800),
])
def test_bytes_of_the_120b_are_the_published_sums(length, wanted):
    """On the meta device: no memory, the real shapes. Pages of one row hold exactly what is kept."""
    for page_size in (1, 64):
        pool = PagePool(preset("gpt-oss-120b"), pages=131_072 // page_size + 1, rings=2, page_size=page_size,
                        dtype=torch.bfloat16, device="meta")
        cache = pool.new_cache()
        cache.reserve(length)
        cache.length = length
        assert cache.bytes == wanted
        if page_size == 1:
            full = 18 * 2048 * length
            assert cache.held_bytes == full + 18 * 2048 * 128 and pool.ring_pages == 128
    # 64 rows a page: any window touches at most 3 pages, so the ring holds 192 rows and not 128
    assert pool.ring_pages == 3
    assert cache.held_bytes == 18 * 2048 * (-(-length // 64) * 64 + 192)


def test_a_long_sequence_of_the_120b_holds_less_than_half_of_two_thirds():
    pool = PagePool(preset("gpt-oss-120b"), pages=2049, rings=2, dtype=torch.bfloat16, device="meta")
    cache = pool.new_cache()
    cache.reserve(131_072)
    assert cache.held_bytes / 1e9 == pytest.approx(4.84, abs=0.005) and pool.free_pages == 0
    assert pool.bytes == 18 * 2048 * 64 * (2049 + 2 * 3)
    half = PagePool(preset("gpt-oss-120b"), pages=2049, rings=2, dtype=torch.bfloat16, device="meta", kv_form="fp8")
    assert half.bytes == pool.bytes // 2 + 2 * 36 * 8 * 4


@pytest.mark.parametrize(("page_size", "draft"), [(1, 0), (1, 3), (4, 0), (4, 2), (64, 0), (64, 8), (128, 1)])
def test_a_ring_holds_any_window_and_draft(page_size, draft):
    """The fewest pages for which no window and draft, wherever it begins, meets the same page twice."""
    c = config(sliding_window=128)
    pool = PagePool(c, pages=2, rings=2, page_size=page_size, draft=draft, **CPU)
    span = 128 + draft
    touched = max((start + span - 1) // page_size - start // page_size + 1 for start in range(page_size))
    assert pool.ring_pages == touched


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rolling_back_is_as_if_the_tokens_had_never_come(model, data):
    """Tokens, some of them on trial and taken back, in any pattern up to the draft: the logits of one whole pass."""
    draft, page_size = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 3, 5, 64]))
    ids, noise = tokens(model.config, 60), tokens(model.config, 60, seed=9)
    paged = PagePool(model.config, pages=70, rings=2, page_size=page_size, draft=draft, **CPU).new_cache()
    growing, at = SequenceCache(model.config, torch.float32, "cpu", draft=draft), 0
    with torch.inference_mode():
        whole = model(ids, logits="all")
        while at < 50:
            sure = data.draw(st.integers(1, 9), label="kept")
            trial = data.draw(st.integers(0, draft), label="taken back")
            fed = torch.cat([ids[at : at + sure], noise[:trial]])
            ours, theirs = (model(fed, caches=[cache], logits="all")[:sure] for cache in (paged, growing))
            assert torch.equal(ours, theirs) and distance(ours, whole[at : at + sure]) <= 1e-5
            at += sure
            for cache in (paged, growing):
                cache.truncate(at)
                assert cache.length == at
            assert len(paged.pages) == -(-at // page_size)


@pytest.mark.parametrize("kind", ["paged", "plain"])
def test_roll_back_when_the_ring_is_full(model, kind):
    """At every length around and beyond the window (7): draft tokens may go, one more may not, and nothing changes."""
    draft = 3
    every = tokens(model.config, 29 + draft)
    alone = run(model, every, 1, model.new_cache())
    for length in (1, 3, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 18, 29):
        pool = pool_for(model, draft=draft)
        cache = pool.new_cache() if kind == "paged" else SequenceCache(model.config, torch.float32, "cpu", draft=draft)
        ids = every[: length + draft]
        run(model, ids, 1, cache)
        cache.truncate(length)
        if length > 7 + draft:
            with pytest.raises(ValueError, match="keep 3 positions more than the window"):
                cache.truncate(length - 1)
        assert cache.length == length
        assert torch.equal(run(model, ids[length:], 1, cache), alone[length : length + draft])
    with pytest.raises(ValueError, match="a sequence of 32 tokens cannot be cut to 33"):
        cache.truncate(33)
    with pytest.raises(ValueError, match="cannot be cut to -1"):
        cache.truncate(-1)


def test_a_step_that_raises_changes_nothing(model):
    ids = tokens(model.config, 40)
    cache = pool_for(model).new_cache()
    run(model, ids[:20], 20, cache)

    def fail(what, layer, value):
        if what == "router_ids" and layer == 3:
            raise RuntimeError("stop")

    with torch.inference_mode(), pytest.raises(RuntimeError, match="stop"):
        model(ids[20:35], caches=[cache], observe=fail)
    assert cache.length == 20
    assert torch.equal(run(model, ids[20:], [15, 5], cache), run(model, ids, [20, 15, 5], model.new_cache())[20:])


def test_rows_a_kernel_wrote_by_the_table_are_read_back(model):
    """What a paged kernel does: write at the places that `table` names, then commit."""
    ids = tokens(model.config, 24)
    pool = pool_for(model, page_size=4)
    theirs, cache = model.new_cache(), pool.new_cache()
    run(model, ids[:1], 1, theirs)
    for position in range(20):
        cache.reserve(1)
        for n, layer in enumerate(theirs.layers):
            page = cache.table(model.config.is_sliding(n), position // 4 + 1)[position // 4]
            pool.keys[n][page, position % 4] = layer.keys[-1]
            pool.values[n][page, position % 4] = layer.values[-1]
        cache.commit(1)
        run(model, ids[position + 1 : position + 2], 1, theirs)
    plain = model.new_cache()
    run(model, ids[:20], 1, plain)
    assert torch.equal(run(model, ids[20:], 1, cache), run(model, ids[20:], 1, plain))


def test_an_index_of_rows_is_made_for_extend_alone(model):
    """Steps of a kernel that writes pages itself copy nothing to the device; when pages change, the next index does."""
    pool, made = pool_for(model, page_size=4), []
    cache = pool.new_cache()
    for length in (3, 4, 5, 9, 10):
        cache.reserve(length - cache.length)
        cache.commit(length - cache.length)
    cache.truncate(10)
    assert not cache._index
    for _ in range(3):
        run(model, tokens(model.config, 1), 1, cache)
        made.append(cache._index["pages"][1])
    assert made[0] is made[1] and len(made[0]) == 12 and len(made[2]) == 16 and cache.length == 13
    assert not cache._unwritten


def test_tables(model):
    pool = pool_for(model, page_size=4, draft=2)      # window 7 + draft 2: 9 rows, at most 3 pages of 4
    assert pool.ring_pages == 3
    first, second = pool.new_cache(), pool.new_cache()
    assert first.ring == [3, 4, 5] and second.ring == [6, 7, 8]
    first.reserve(5)
    second.reserve(1)
    first.reserve(9)
    assert first.pages == [1, 2, 4] and second.pages == [3]
    assert first.table(False, 3) == [1, 2, 4] and first.table(True, 7) == [3, 4, 5, 3, 4, 5, 3]
    with pytest.raises(ValueError, match="4 logical pages were asked for; the sequence holds 3"):
        first.table(False, 4)


def test_pages_and_rings_are_taken_and_given_back(model):
    pool = pool_for(model, pages=6, rings=3)
    assert (pool.free_pages, pool.free_rings) == (5, 2)
    one, two = pool.new_cache(), pool.new_cache()
    with pytest.raises(CacheFull, match="all 2 rings are held"):
        pool.new_cache()
    one.reserve(8)
    two.reserve(9)
    assert (pool.free_pages, pool.free_rings) == (0, 0)
    with pytest.raises(CacheFull, match="1 more pages of 4 positions are needed; 0 of 5 are free"):
        one.reserve(9)
    assert len(one.pages) == 2
    one.reserve(8)                                    # already there
    two.release()
    two.release()
    assert (pool.free_pages, pool.free_rings) == (3, 1)
    with pytest.raises(CacheFull, match="4 more pages of 4 positions are needed; 3 of 5 are free"):
        one.reserve(21)
    assert pool.free_pages == 3 and len(one.pages) == 2
    with pytest.raises(ValueError, match="released"):
        two.reserve(1)
    with torch.inference_mode(), pytest.raises(ValueError, match="released"):
        model(tokens(model.config, 1), caches=[two])
    one.release()
    assert (pool.free_pages, pool.free_rings) == (5, 2)


def test_a_full_pool_in_the_middle_of_a_step_loses_nothing(model):
    ids = tokens(model.config, 20)
    pool = pool_for(model, pages=5, rings=3)
    cache, other = pool.new_cache(), pool.new_cache()
    run(model, ids[:9], 9, cache)
    other.reserve(4)
    with pytest.raises(CacheFull, match="2 more pages"):
        run(model, ids[9:], 11, cache)
    assert cache.length == 9 and pool.free_pages == 0
    other.release()
    assert torch.equal(run(model, ids[9:13], 4, cache), run(model, ids[:13], [9, 4], model.new_cache())[9:])


@pytest.mark.parametrize(("changes", "message"), [
    ({"pages": 1}, "pages is 1; at least 2 is expected"), ({"rings": 1}, "rings is 1; at least 2"),
    ({"page_size": 0}, "page_size is 0; at least 1"), ({"draft": -1}, "draft is -1; at least 0"),
    ({"kv_form": "fp4"}, "kv_form is 'fp4'; 'same' or 'fp8'"),
])
def test_bad_input(model, changes, message):
    with pytest.raises(ValueError, match=message):
        pool_for(model, **changes)
