"""The fast forward on the CPU, its plain backends, against the plain Transformer: the same logits in fp32.

Window 7, pages of 4: every border of page, ring, window and chunk is crossed within a few dozen tokens; one test has
the released window of 128.
"""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.model.fast import FastTransformer, LaidOut, lay_out, make_pool
from gptoss_lab.model.fast.forward import rope_tables
from gptoss_lab.model.load import build_model, load_model

EXACT = 1e-5
SHORT = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def source():
    return random_source(config(**SHORT))


@pytest.fixture(scope="module")
def plain(source):
    return build_model(source, dtype=torch.float32)


def fast(source, experts="dense", sequences=6, page_size=4, draft=0, **more):
    weights = lay_out(source, "cpu", torch.float32, experts=experts)
    pool = make_pool(weights, tokens=400, sequences=sequences, page_size=page_size, draft=draft)
    return FastTransformer(weights, pool, **more)


def run_plain(model, ids, sizes=None, logits="all"):
    cache = model.new_cache()
    parts = [model(part, caches=[cache], logits=logits) for part in ids.split(sizes or [len(ids)])]
    return torch.cat(parts)


@pytest.mark.parametrize("experts", ["dense", "mxfp4", "fp8"])
def test_prefill_of_every_length_around_the_borders(source, plain, experts):
    model = fast(source, experts)
    for length in (1, 2, 6, 7, 8, 12, 13, 41):
        ids = tokens(model.config, length, length)
        cache = model.new_cache()
        got = model(ids, [length], [cache], logits="all")
        assert distance(got, plain(ids, logits="all")) <= EXACT
        assert cache.length == length
        cache.release()
    assert model.pool.free_rings == 6


@pytest.mark.parametrize("sizes", [[20, 21], [1, 40], [5, 1, 1, 34], [6, 7, 8, 20], [7, 34], [40, 1], [8] * 5 + [1]],
                         ids=str)
def test_chunks_equal_one_pass(source, plain, sizes):
    model, ids = fast(source), tokens(config(), sum(sizes))
    cache = model.new_cache()
    got = torch.cat([model(part, [len(part)], [cache], logits="all") for part in ids.split(sizes)])
    assert distance(got, plain(ids, logits="all")) <= EXACT


@pytest.mark.parametrize("graphs", [True, False])
def test_decode_equals_one_pass(source, plain, graphs):
    model, ids = fast(source, graphs=graphs), tokens(config(), 45)
    cache = model.new_cache()
    parts = [model(ids[:9], [9], [cache], logits="all")]
    parts += [model(ids[n : n + 1], [1], [cache]) for n in range(9, 45)]
    assert distance(torch.cat(parts), plain(ids, logits="all")) <= EXACT


def test_mixed_batches_and_the_rows_asked_for(source, plain):
    """A decode row, a first chunk and a later chunk in one step; then decode of all three."""
    model = fast(source)
    rows = [tokens(model.config, n, seed) for seed, n in enumerate((13, 20, 36))]
    whole = [plain(row, logits="all") for row in rows]
    caches = [model.new_cache() for _ in rows]
    assert model(torch.cat([rows[1][:18], rows[2][:30]]), [18, 30], caches[1:], logits="none") is None
    step = torch.cat([rows[0][:12], rows[1][18:19], rows[2][30:35]])
    got = model(step, [12, 1, 5], caches, logits="last")
    assert distance(got, torch.stack([whole[0][11], whole[1][18], whole[2][34]])) <= EXACT
    last = model(torch.stack([rows[0][12], rows[1][19], rows[2][35]]), [1, 1, 1], caches)
    assert distance(last, torch.stack([one[-1] for one in whole])) <= EXACT


@pytest.mark.parametrize("length", [127, 128, 129])
def test_the_released_window(length):
    """Window 128, pages of 64: prefill to the border, a chunk across it, decode on."""
    c = config(sliding_window=128, num_layers=2, **SHORT)
    source = random_source(c)
    ids, plain = tokens(c, length + 70), build_model(source, dtype=torch.float32)
    whole, model = plain(ids, logits="all"), fast(source, page_size=64)
    cache = model.new_cache()
    parts = [model(ids[:length], [length], [cache], logits="all"),
             model(ids[length : length + 66], [66], [cache], logits="all")]
    parts += [model(ids[n : n + 1], [1], [cache]) for n in range(length + 66, length + 70)]
    assert distance(torch.cat(parts), whole) <= EXACT


def test_without_caches_nothing_is_held(source, plain):
    model = fast(source)
    ids = tokens(model.config, 30)
    free = model.pool.free_pages, model.pool.free_rings
    assert distance(model(ids, [10, 20]), plain(ids, [10, 20])) <= EXACT
    with pytest.raises(ValueError, match="all together"):
        model(ids, [10, 21])
    assert (model.pool.free_pages, model.pool.free_rings) == free


def test_verify_and_roll_back(source, plain):
    """A draft of 3 tokens is fed, 2 are taken back with the ring full, and decode goes on as if they had not been."""
    model, ids = fast(source, draft=3), tokens(config(), 40)
    cache = model.new_cache()
    model(ids[:25], [25], [cache], logits="none")
    wrong = torch.tensor([5, 6])
    model(torch.cat([ids[25:26], wrong]), [3], [cache], logits="all")
    cache.truncate(26)
    got = torch.cat([model(ids[n : n + 1], [1], [cache]) for n in range(26, 40)])
    assert distance(got, plain(ids, logits="all")[26:]) <= EXACT


def test_projections_in_fp8_are_near_and_say_how_near(source, plain):
    weights = lay_out(source, "cpu", torch.float32, experts="dense", projections="fp8")
    model = FastTransformer(weights, make_pool(weights, tokens=100, sequences=2, page_size=4))
    ids = tokens(model.config, 30)
    assert 0.01 < weights.rounding["qkv"] < 0.04 and 0.01 < weights.rounding["out"] < 0.04
    cache = model.new_cache()
    got = [model(ids[:20], [20], [cache], logits="all")] + [model(i[None], [1], [cache]) for i in ids[20:]]
    exact = plain(ids, logits="all")
    error = (torch.cat(got) - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-3 < error.median() < 0.1


@pytest.mark.parametrize(("experts", "projections"), [("fp8", "fp8"), ("mxfp4", "dense"), ("dense", "dense")])
def test_the_plain_model_of_the_very_weights(source, plain, experts, projections):
    """`LaidOut` gives every tensor back: exact where nothing was rounded, and equal to the fast forward either way."""
    weights = lay_out(source, "cpu", torch.float32, experts=experts, projections=projections)
    same = build_model(LaidOut(weights), dtype=torch.float32, expert_storage="stored")
    ids = tokens(weights.config, 30)
    model = FastTransformer(weights, make_pool(weights, tokens=100, sequences=2, page_size=4))
    assert distance(model(ids, logits="all"), same(ids, logits="all")) <= EXACT
    assert (distance(same(ids, logits="all"), plain(ids, logits="all")) <= EXACT) == (projections == "dense")
    with pytest.raises(KeyError, match="no tensor"):
        LaidOut(weights).tensor("model.something")


def test_checkpoints_of_every_form_give_the_plain_models_logits(tmp_path):
    """Both released layouts, the FP8 conversion, and one whose projections are FP8 in the file already."""
    c = config(hidden_size=160, intermediate_size=288, num_heads=8, num_kv_heads=4, num_layers=2, **SHORT)
    hf, original = synth(c, tmp_path / "hf"), synth(c, tmp_path / "original", "original")
    folders = [hf, original, convert(hf, tmp_path / "fp8").path, convert(hf, tmp_path / "all", attention_fp8=True).path]
    ids = tokens(c, 30)
    for folder in folders:
        plain = load_model(folder, "cpu", torch.float32)(ids, logits="all")
        for experts, projections in (("fp8", "dense"), ("mxfp4", "fp8" if folder.name == "all" else "dense")):
            weights = lay_out(open_checkpoint(folder), "cpu", torch.float32, experts=experts, projections=projections)
            model = FastTransformer(weights, make_pool(weights, tokens=60, sequences=1, page_size=4))
            assert distance(model(ids, logits="all"), plain) <= EXACT
            assert weights.rounding == {}


def test_tables_hold_every_position(plain):
    """The angles of the plain model's own table, far beyond the original context too."""
    cos, sin = rope_tables(config(), torch.device("cpu"))
    at = torch.tensor([0, 1, 4095, 4096, 5000, 100_000, 131_071])
    assert cos.shape == (131_072, 16)
    for ours, theirs in zip((cos[at], sin[at]), plain.rope(at), strict=True):
        assert torch.equal(ours, theirs)


def test_first_layers_share_their_tensors(source):
    weights = lay_out(source, "cpu", torch.float32, experts="mxfp4")
    cut = weights.first(2)
    assert cut.config.num_layers == 2 and cut.layers[1].qkv.weight is weights.layers[1].qkv.weight
    assert cut.bytes < weights.bytes


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m(tokens(m.config, 3), [3], [m.new_cache()], logits="some"), "'last', 'all' or 'none'"),
    (lambda m: m(tokens(m.config, 3), [1, 2], [m.new_cache()]), "2 lengths but 1 caches"),
    (lambda m: m(tokens(m.config, 3), [2], [m.new_cache()]), "number of token ids"),
    (lambda m: m(tokens(m.config, 3)[None], [3], [m.new_cache()]), "one flat row"),
    (lambda m: m(tokens(m.config, 2), [1, 1], [m.new_cache()] * 2), "stands twice"),
    (lambda m: m(tokens(m.config, 5000), [5000], [m.new_cache()]), "model's length"),
])
def test_bad_input(source, call, message):
    with pytest.raises(ValueError, match=message):
        call(fast(source))


def test_a_full_pool_says_so_before_anything_runs(source):
    from gptoss_lab.model.paged import CacheFull

    model = fast(source)
    cache = model.new_cache()
    with pytest.raises(CacheFull, match="more pages"):
        model(tokens(model.config, 2000), [2000], [cache])
    assert cache.length == 0 and not cache.pages


def test_pools_and_forms_that_do_not_fit(source):
    from gptoss_lab.model.paged import PagePool

    weights = lay_out(source, "cpu", torch.float32, experts="dense")
    make = {"pages": 3, "rings": 2, "device": "cpu"}
    with pytest.raises(ValueError, match="must be alike"):
        FastTransformer(weights, PagePool(weights.config, dtype=torch.bfloat16, **make))
    with pytest.raises(ValueError, match="pool has 2 layers"):
        FastTransformer(weights, PagePool(weights.config.with_layers(2), dtype=torch.float32, **make))
    with pytest.raises(ValueError, match="experts is 'fp4'"):
        lay_out(source, "cpu", experts="fp4")
