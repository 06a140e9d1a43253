"""The fast forward on a Hopper GPU: real shapes in two layers against the plain fp32 model of the same weights, graphs
against eager, other requests in a replay, every form of the weights."""
import dataclasses

import pytest
import torch
from random_models import tokens

from gptoss_lab.checkpoint.synthetic import Synthetic
from gptoss_lab.config import preset
from gptoss_lab.model.fast import FastTransformer, LaidOut, lay_out, make_pool
from gptoss_lab.model.kv_scales import measured_scales
from gptoss_lab.model.load import build_model
from gptoss_lab.model.paged import PagePool

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the CPU tests stand alone"),
]
CONFIG = dataclasses.replace(preset("gpt-oss-20b").with_layers(2), vocab_size=4096, num_experts=16)
PLAIN = dict.fromkeys(("rms_norm", "rope", "sink_attention", "route", "moe"), "reference")
FORMS = {("fp8", "dense"): 0.03, ("mxfp4", "dense"): 0.03, ("fp8", "fp8"): 0.05}


@pytest.fixture(scope="module", params=list(FORMS), ids=str)
def case(request):
    experts, projections = request.param
    weights = lay_out(Synthetic(CONFIG), "cuda", torch.bfloat16, experts=experts, projections=projections)
    plain = build_model(LaidOut(weights), "cuda", torch.float32, expert_storage="stored", backends=PLAIN)
    return weights, plain, FORMS[request.param]


def model_of(weights, tokens_held=20000, sequences=16, **more):
    return FastTransformer(weights, make_pool(weights, tokens=tokens_held, sequences=sequences), **more)


def ids_of(count, seed=0):
    return tokens(CONFIG, count, seed).cuda()


def error(ours, exact):
    return ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()


@pytest.mark.parametrize("sizes", [[700], [127, 1, 128, 129, 315], [1] * 4 + [696]], ids=str)
def test_prefill_chunks_and_decode_equal_plain_fp32(case, sizes):
    weights, plain, limit = case
    ids = ids_of(700)
    with torch.inference_mode():
        exact = plain(ids, logits="all")
    model = model_of(weights)
    cache, parts = model.new_cache(), []
    for part in ids.split(sizes):
        parts.append(model(part, [len(part)], [cache], logits="all" if len(part) > 1 else "last"))
    got = torch.cat(parts)
    assert torch.isfinite(got).all() and error(got, exact) <= limit


def test_a_ragged_batch_and_its_decode(case):
    weights, plain, limit = case
    rows = [ids_of(n, n) for n in (5, 300, 129, 1000)]
    with torch.inference_mode():
        exact = torch.stack([plain(row)[0] for row in rows])
    model = model_of(weights)
    caches = [model.new_cache() for _ in rows]
    model(torch.cat([row[:-1] for row in rows]), [len(row) - 1 for row in rows], caches, logits="none")
    got = model(torch.stack([row[-1] for row in rows]), [1] * 4, caches)
    assert error(got, exact) <= limit


def test_graph_equals_eager_with_other_requests_in_each_replay(case):
    """Case P26 on the device: captured at 8; 5 requests, 8, then 5 others in the pages of the first; 70 steps each."""
    weights, _, _ = case
    graphed, eager = model_of(weights, sizes=(8,)), model_of(weights, graphs=False)
    reports = graphed.capture()
    assert reports[0].seconds > 0 and reports[0].bytes >= 0
    batches = ((3, 90, 300, 70, 129), (64, 1, 63, 128, 200, 60, 130, 400), (11, 2, 65, 330, 127))
    for seed, lengths in enumerate(batches):
        outputs = []
        for model in (graphed, eager):
            caches = [model.new_cache() for _ in lengths]
            for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
                model(ids_of(length, seed + row), [length], [cache], logits="none")
            ids = ids_of(len(lengths), seed + 100)
            outputs.append(torch.stack([model(ids, [1] * len(ids), caches) for _ in range(70)]))
            for cache in caches:
                cache.release()
        assert error(*outputs) <= 2e-2                                  # other batch sizes, other forms of the kernels


def test_a_replay_is_bit_for_bit_what_was_captured(case):
    """The same function over the same buffers, run and replayed."""
    model = model_of(case[0], sizes=(8,))
    caches, ids = [model.new_cache() for _ in range(5)], ids_of(5)
    for cache in caches:
        model(ids_of(200), [200], [cache], logits="none")
    model(ids, [1] * 5, caches)
    captured = model._decode.captured[8]
    replayed = captured.outputs[0].clone()
    with torch.inference_mode():
        assert torch.equal(replayed[:5], model._run_decode(captured.decode)[0][:5])


def test_spare_rows_write_to_page_and_ring_0_alone(case):
    model = model_of(case[0], sizes=(16,))
    caches = [model.new_cache() for _ in range(3)]
    ids = ids_of(3)
    for cache in caches:
        model(ids_of(150), [150], [cache], logits="none")
    model(ids, [1] * 3, caches)
    before = [pages.clone() for pages in model.pool.keys]
    model(ids, [1] * 3, caches)
    for n, (old, now) in enumerate(zip(before, model.pool.keys, strict=True)):
        changed = set((old != now).flatten(1).any(dim=1).nonzero().flatten().tolist())
        own = {(c.ring[151 // 64 % len(c.ring)] if CONFIG.is_sliding(n) else c.pages[151 // 64]) for c in caches}
        assert own <= changed <= own | {0}


@pytest.mark.parametrize("batch", [1, 9, 40, 128])
def test_every_decode_form(case, batch):
    """One program, few and many rows of every kernel; rows of a batch equal themselves alone."""
    weights, plain, limit = case
    model = model_of(weights, sequences=130, sizes=(batch,))
    caches = [model.new_cache() for _ in range(batch)]
    ids = ids_of(2 * batch).view(2, batch)
    for row in ids:
        got = model(row, [1] * batch, caches)
    with torch.inference_mode():
        exact = torch.cat([plain(ids[:, n].contiguous()) for n in range(batch)])
    assert error(got, exact) <= limit


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_of_a_few_tokens_each(case, graphs):
    """What verifying needs: five tokens a sequence with the ring full, ragged counts, some taken back; captured."""
    weights, plain, limit = case
    pool = make_pool(weights, tokens=4000, sequences=4, draft=4)
    model = FastTransformer(weights, pool, sizes=(4, 32), graphs=graphs)
    rows, at = [ids_of(n + 12, n) for n in (130, 64, 300, 5)], [130, 64, 300, 5]
    with torch.inference_mode():
        whole = [plain(row, logits="all") for row in rows]
    caches = [model.new_cache() for _ in rows]
    model(torch.cat([row[:n] for row, n in zip(rows, at, strict=True)]), at, caches, logits="none")
    for counts, kept in (((5, 5, 5, 5), (5, 1, 3, 2)), ((1, 5, 2, 4), (1, 5, 1, 4))):
        ids = torch.cat([row[a : a + n] for row, a, n in zip(rows, at, counts, strict=True)])
        got = model(ids, counts, caches, logits="all")
        want = torch.cat([one[a : a + n] for one, a, n in zip(whole, at, counts, strict=True)])
        assert error(got, want) <= limit
        at = [a + n for a, n in zip(at, kept, strict=True)]
        for cache, length in zip(caches, at, strict=True):
            cache.truncate(length)
    assert not graphs or list(model._decode.captured) == [32]


@pytest.mark.parametrize("sizes", [[700], [127, 1, 128, 129, 315]], ids=str)
def test_an_e4m3_pool(case, sizes):
    """Against the plain fp32 model over an e4m3 pool of the same scales, those of the largest magnitudes."""
    weights, plain, limit = case
    ids, pools = ids_of(700), []
    scales = measured_scales(lambda part, cache: plain(part, caches=[cache]), plain.new_cache, [ids_of(700, 1)])
    for dtype in (torch.bfloat16, torch.float32):
        pools.append(PagePool(CONFIG, pages=14, rings=2, dtype=dtype, device="cuda", kv_form="fp8"))
        pools[-1].key_scales, pools[-1].value_scales = (scale.clone() for scale in scales)
    model, results = FastTransformer(weights, pools[0]), []
    for runs, pool in ((model, pools[0]), (plain, pools[1])):
        cache = pool.new_cache()
        with torch.inference_mode():
            results.append(torch.cat([runs(part, [len(part)], [cache], logits="all") for part in ids.split(sizes)]))
    assert torch.isfinite(results[0]).all() and error(*results) <= 1.5 * limit   # a key rounds otherwise now and then
    assert {plan.choice.backend for plan in model._decode.capture(1).decode.plans} == {"triton"}


def test_loading_holds_no_second_copy():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = lay_out(Synthetic(CONFIG), "cuda", torch.bfloat16, experts="fp8")
    held = torch.cuda.memory_allocated() - before
    assert held < 1.02 * weights.bytes + 2**24
    assert torch.cuda.max_memory_allocated() - before < weights.bytes + 2 * 2**30
