"""What a prefill step plans: where each token goes, when it is planned, and what the next step takes again."""
import pytest
import torch
from random_models import config, random_source

import gptoss_lab.model.fast.step as steps
from gptoss_lab.model.fast import FastTransformer, lay_out
from gptoss_lab.model.paged import PagePool


@pytest.fixture(scope="module")
def model():
    weights = lay_out(random_source(config()), "cpu", torch.float32, experts="dense")
    pool = PagePool(weights.config, pages=40, rings=4, page_size=4, draft=2, dtype=torch.float32, device="cpu")
    return FastTransformer(weights, pool)


def planned(model, caches, lengths):
    return steps.PrefillStep(model.pool, caches, lengths, model._forward.heads, model.operations, None)


@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 5, 31), (16, 8, 3)])
def test_every_token_has_its_place(model, starts):
    pool, lengths = model.pool, (1, 13, 8)
    caches = [model.new_cache() for _ in starts]
    for cache, start, new in zip(caches, starts, lengths, strict=True):
        cache.reserve(start)
        cache.commit(start)
        cache.reserve(new)
    step = planned(model, caches, lengths)
    at = [(c, start + n, new - n) for c, start, new in zip(caches, starts, lengths, strict=True) for n in range(new)]
    assert step.positions.tolist() == [p for _, p, _ in at] and step.positions.dtype == torch.int32
    assert step.full.slots.tolist() == [c.pages[p // 4] * 4 + p % 4 for c, p, _ in at]
    reach = pool.config.sliding_window + pool.draft
    assert step.sliding.slots.tolist() == [
        c.ring[p // 4 % len(c.ring)] * 4 + p % 4 if left <= reach else -1 for c, p, left in at]
    assert step.kind(True) is step.sliding and step.kind(False) is step.full
    for cache in caches:
        cache.release()


def test_steps_of_the_same_lengths_share_their_plans(model):
    caches = [model.new_cache() for _ in range(2)]
    for cache in caches:
        cache.reserve(40)
    one, other = (planned(model, caches, (9, 4)) for _ in range(2))
    assert one.full.plan is other.full.plan and one.sliding.plan is other.sliding.plan
    assert one.full.plan is not one.sliding.plan
    assert planned(model, caches, (4, 9)).full.plan is not one.full.plan
    for cache in caches:
        cache.release()


def test_embedding_and_first_product_come_before_the_plans(model, monkeypatch):
    order, places, qkv = [], steps.PrefillStep._places.func, model._forward._qkv

    class Watched(steps.PrefillStep):
        @property
        def _places(self):
            order.append("places")
            return places(self)

    monkeypatch.setattr("gptoss_lab.model.fast.transformer.PrefillStep", Watched)
    monkeypatch.setattr(model._forward, "_qkv", lambda *given: order.append("qkv") or qkv(*given))
    model(torch.arange(40))
    assert order[:2] == ["qkv", "places"]
