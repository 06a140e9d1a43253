"""The fast forward over an e4m3 pool against the plain Transformer over another of the same scales: the same logits and
the same bytes, whatever the chunks. Window 7 and pages of 4, so that every border is crossed."""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.model.kv_scales import measured_scales
from gptoss_lab.model.load import build_model

EXACT, FLIPPED = 1e-5, 0.05
SHORT = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def source():
    return random_source(config(**SHORT))


@pytest.fixture(scope="module")
def plain(source):
    return build_model(source, dtype=torch.float32)


@pytest.fixture(scope="module")
def weights(source):
    return lay_out(source, "cpu", torch.float32, experts="dense")


@pytest.fixture(scope="module")
def scales(plain):
    prompt = tokens(plain.config, 60, seed=3)
    return measured_scales(lambda ids, cache: plain(ids, caches=[cache]), plain.new_cache, [prompt])


def fp8_pool(weights, scales, draft=0, held=400):
    pool = make_pool(weights, tokens=held, sequences=6, page_size=4, draft=draft, kv_form="fp8")
    pool.key_scales, pool.value_scales = (scale.clone() for scale in scales)
    return pool


def flips(ours, theirs):
    """Share of the stored codes that differ, what belongs to nobody left out; none by more than one code."""
    differ = count = 0
    for n, (a, b) in enumerate((a, b) for x, y in ((ours.keys, theirs.keys), (ours.values, theirs.values))
                               for a, b in zip(x, y, strict=True)):
        first = ours.ring_pages if ours.config.is_sliding(n % ours.config.num_layers) else 1
        apart = (a[first:].view(torch.uint8).int() - b[first:].view(torch.uint8).int()).abs()
        assert apart.max() <= 1
        differ, count = differ + int((apart > 0).sum()), count + apart.numel()
    return differ / count


def assert_same(got, want, ours, theirs):
    """1e-5; where a number lies so near the middle of two codes that the order of an fp32 sum decides, few differ."""
    share = flips(ours, theirs)
    assert share < 1e-4
    assert distance(got, want) <= (EXACT if share == 0 else FLIPPED)


@torch.inference_mode()
def run(model, ids, sizes, cache):
    return torch.cat([model(part, [len(part)], [cache], logits="all") for part in ids.split(sizes)])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sizes", [[41], [20, 21], [1, 40], [6, 7, 8, 20], [7, 34], [40, 1], [1] * 20, [9] + [1] * 32],
                         ids=str)
def test_equals_the_plain_model_over_an_e4m3_pool(weights, plain, scales, sizes, graphs):
    pools, ids = [fp8_pool(weights, scales) for _ in range(2)], tokens(config(), sum(sizes))
    got = run(FastTransformer(weights, pools[0], graphs=graphs), ids, sizes, pools[0].new_cache())
    want = run(plain, ids, sizes, pools[1].new_cache())
    assert_same(got, want, *pools)
    assert distance(got, plain(ids, logits="all")) > 1e-3                # and not what an exact cache gives


def test_where_a_prompt_is_cut_changes_nothing(weights, scales):
    """The step that brings rows attends to the rounded ones too: a whole prompt, chunks and single tokens agree."""
    ids, pools = tokens(config(), 40), []
    results = []
    for sizes in ([40], [13, 27], [6, 1, 8, 25], [1] * 40):
        pools.append(fp8_pool(weights, scales))
        model = FastTransformer(weights, pools[-1])
        results.append(run(model, ids, sizes, model.new_cache()))
    for pool, result in zip(pools[1:], results[1:], strict=True):
        full = [n for n in range(len(pool.keys)) if not pool.config.is_sliding(n)]
        apart = sum(int((pool.keys[n][1:].view(torch.uint8) != pools[0].keys[n][1:].view(torch.uint8)).sum())
                    for n in full)
        assert apart <= 3 and distance(result, results[0]) <= (EXACT if apart == 0 else FLIPPED)


def test_mixed_batches(weights, plain, scales):
    """A decode row, a first and a later chunk in one step, then decode of all three."""
    rows = [tokens(config(), n, seed) for seed, n in enumerate((13, 20, 36))]
    pools, outputs = [fp8_pool(weights, scales) for _ in range(2)], []
    for model, pool in ((FastTransformer(weights, pools[0], sizes=(4,)), pools[0]), (plain, pools[1])):
        caches = [pool.new_cache() for _ in rows]
        with torch.inference_mode():
            model(torch.cat([rows[1][:18], rows[2][:30]]), [18, 30], caches[1:], logits="none")
            outputs.append(torch.cat([
                model(torch.cat([rows[0][:12], rows[1][18:19], rows[2][30:35]]), [12, 1, 5], caches),
                model(torch.stack([rows[0][12], rows[1][19], rows[2][35]]), [1, 1, 1], caches)]))
    assert_same(*outputs, *pools)


@pytest.mark.parametrize("length", [127, 128, 129])
def test_the_released_window(length):
    c = config(sliding_window=128, num_layers=2, **SHORT)
    source = random_source(c)
    plain, weights = build_model(source, dtype=torch.float32), lay_out(source, "cpu", torch.float32, experts="dense")
    ids, pools = tokens(c, length + 70), []
    for _ in range(2):
        pools.append(make_pool(weights, tokens=300, sequences=1, kv_form="fp8"))
        pools[-1].key_scales.fill_(0.02)
        pools[-1].value_scales.fill_(0.01)
    sizes = [length, 66, 1, 1, 1, 1]
    assert_same(run(FastTransformer(weights, pools[0]), ids, sizes, pools[0].new_cache()),
                run(plain, ids, sizes, pools[1].new_cache()), *pools)


def test_every_scale_matters_and_graphs_see_it_where_it_lies(weights, scales):
    """Written into after the capture; half the largest magnitude of a head cuts it."""
    ids, pool = tokens(config(), 20), fp8_pool(weights, scales)
    model = FastTransformer(weights, pool)

    def logits():
        cache = model.new_cache()
        try:
            return run(model, ids, [19, 1], cache)
        finally:
            cache.release()

    first = logits()
    for of in (pool.key_scales, pool.value_scales):
        for layer in (0, 3):
            of[layer, 1] /= 4
            assert distance(logits()[-1], first[-1]) > 1e-3
            of[layer, 1] *= 4
    assert torch.equal(logits(), first)
    pool.value_scales = pool.value_scales.clone()
    with pytest.raises(ValueError, match="other tensors than when the model was made"):
        logits()


@pytest.mark.parametrize("kind", ["plain", "speculative"])
def test_engines_yield_the_tokens_of_the_plain_model_over_such_a_pool(weights, plain, scales, kind):
    prompts = [tokens(config(), n, n).tolist() for n in (5, 20, 9, 33, 1)]
    greedy = SamplingParams(temperature=0, max_new_tokens=12, stop_ids=())
    want = Engine(plain, PlainDecoder(plain, 16, fp8_pool(weights, scales))).complete(prompts, greedy)
    model = FastTransformer(weights, fp8_pool(weights, scales, draft=2), sizes=(2, 8, 16))
    if kind == "plain":
        decoder = PlainDecoder(model, 11)
    else:
        draft = FastTransformer(weights, fp8_pool(weights, scales, draft=2), sizes=(2, 8, 16))
        decoder = SpeculativeDecoder(model, draft, 2, 11)
    assert [c.tokens for c in Engine(model, decoder).complete(prompts, greedy)] == [c.tokens for c in want]
