"""The scheduler over a page pool: whatever comes and goes, each sequence gets its tokens and pages come back."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import SMALL, drive, small_model

from gptoss_lab.engine import Engine, Event, Failure, Loop, PromptError, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.model.paged import CacheFull, PagePool


@pytest.fixture(scope="module")
def model():
    return small_model()


def pool_of(pages, rings=5, page_size=4, **changes):
    """`pages` and `rings` that sequences can hold."""
    return PagePool(SMALL, pages=pages + 1, rings=rings + 1, page_size=page_size, dtype=torch.float32, device="cpu",
                    **changes)


def greedy(length=5, **changes):
    return SamplingParams(temperature=0, max_new_tokens=length, stop_ids=(), **changes)


def alone(model, prompt, params):
    return Engine(model).complete([prompt], params)[0].tokens


def run(loop, until=None):
    """Steps until idle; {sequence: tokens}."""
    got = {}
    while not loop.idle:
        for event in loop.step():
            got.setdefault(event.sequence, []).append(event.token)
    return {sequence: tuple(tokens) for sequence, tokens in got.items()}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_arrivals_cancels_and_pool_give_each_sequence_the_tokens_it_gets_alone(model, data):
    """Pools from the size of the largest sequence on, pages of 1 to 9 rows, chunks of 1 token or more."""
    prompts = data.draw(st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=18), min_size=1, max_size=7))
    arrival = [data.draw(st.integers(0, 12)) for _ in prompts]
    cancelled = {i: data.draw(st.integers(0, 25)) for i in range(len(prompts)) if data.draw(st.booleans())}
    warm = [data.draw(st.sampled_from([0.0, 0.0, 1.0])) for _ in prompts]
    params = [SamplingParams(heat, seed=i, max_new_tokens=2 + 2 * i, stop_ids=(3,)) for i, heat in enumerate(warm)]
    size = data.draw(st.sampled_from([1, 4, 9]))
    least = max(-(-(len(p) + one.max_new_tokens - 1) // size) for p, one in zip(prompts, params, strict=True))
    pool = pool_of(least + data.draw(st.integers(0, 10)), data.draw(st.integers(1, 5)), size)
    engine = Engine(model, PlainDecoder(model, data.draw(st.sampled_from([1, 4, 1000])), pool))
    loop = Loop(engine, max_batch=data.draw(st.integers(1, 6)))
    got, ended, left = drive(loop, prompts, params, arrival, cancelled)
    assert (pool.free_pages, pool.free_rings) == (pool.pages - 1, pool.rings - 1)
    for i, prompt in enumerate(prompts):
        right = alone(model, prompt, params[i])
        assert tuple(got[i]) == (right[: len(got[i])] if i in left else right)
        assert (i in left) != (i in ended)


def test_the_youngest_makes_room_and_goes_on_where_it_was(model):
    """8 pages of 4: two prompts of 15 take 4 pages each; at the 17th token of the first none is left."""
    prompts = {1: list(range(15)), 2: list(range(5, 20))}
    pool = pool_of(8)
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool)))
    for sequence, prompt in prompts.items():
        loop.submit(sequence, prompt, greedy(8))
    scheduler, got = loop.scheduler, {1: [], 2: []}
    steps = []
    while not loop.idle:
        for event in loop.step():
            got[event.sequence].append(event.token)
        steps.append((scheduler.running, scheduler.waiting, scheduler.preemptions))
    assert steps[:2] == [((1, 2), (), 0)] * 2 and steps[2] == ((1,), (2,), 1)
    assert scheduler.preemptions == 1
    assert {s: tuple(tokens) for s, tokens in got.items()} == {
        s: alone(model, p, greedy(8)) for s, p in prompts.items()}
    ends = [n for n, (running, _, _) in enumerate(steps) if 2 in running]
    assert ends == [0, 1, 8, 9, 10, 11, 12]                     # it came back when the first had ended


def test_nobody_overtakes(model):
    """The second does not fit beside the first; the third, which would, waits behind it."""
    pool = pool_of(6)
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool)))
    for sequence, length in ((1, 13), (2, 12), (3, 1)):
        loop.submit(sequence, [1] * length, greedy(2))
    loop.step()
    assert loop.scheduler.running == (1,) and loop.scheduler.waiting == (2, 3)
    run(loop)
    assert pool.free_pages == 6


def test_rings_limit_the_batch(model):
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool_of(50, rings=2))))
    for sequence in range(4):
        loop.submit(sequence, [sequence, 1], greedy(3))
    loop.step()
    assert loop.scheduler.running == (0, 1) and loop.scheduler.waiting == (2, 3)
    assert set(run(loop)) == {0, 1, 2, 3}


def test_what_others_have_still_to_read_is_not_given_away(model):
    """Chunks of 4: the first prompt holds 1 of its 5 pages when the second asks; 2 of 6 pages would be free in the end.
    """
    pool = pool_of(6)
    loop = Loop(Engine(model, PlainDecoder(model, 4, pool)))
    loop.submit(1, [1] * 18, greedy(2))
    loop.submit(2, [2] * 8, greedy(2))
    loop.step()
    assert loop.scheduler.running == (1,) and pool.free_pages == 5
    run(loop)
    assert loop.scheduler.preemptions == 0


def test_a_request_that_can_never_fit_is_refused_with_numbers(model):
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool_of(5))))
    with pytest.raises(PromptError) as caught:
        loop.submit(7, [1] * 15, greedy(7))
    assert str(caught.value) == ("prompt 7 may come to hold 21 positions, 6 pages of 4; the caches have 5 pages in "
                                 "all: shorten it or ask for fewer new tokens")
    assert loop.idle
    loop.submit(7, [1] * 15, greedy(6))
    assert len(run(loop)[7]) == 6


def test_a_batch_larger_than_the_pool_goes_through_the_engine(model):
    """`Engine.generate` checks all at once, then lets some wait; closing it half-way gives everything back."""
    pool = pool_of(7)
    engine = Engine(model, PlainDecoder(model, pool=pool))
    prompts = [[n, n + 1, n + 2] for n in range(12)]
    done = engine.complete(prompts, greedy(20))
    assert [one.tokens for one in done] == [alone(model, prompt, greedy(20)) for prompt in prompts]
    assert (pool.free_pages, pool.free_rings) == (7, 5)
    stream = engine.generate(prompts, greedy(20))
    next(stream)
    assert pool.free_pages < 7
    stream.close()
    assert (pool.free_pages, pool.free_rings) == (7, 5)
    with pytest.raises(PromptError, match="prompt 1 may come to hold 29 positions, 8 pages of 4"):
        engine.generate([[1], [1] * 10], greedy(20))


def test_bad_logits_end_their_own_sequence_and_no_page_is_lost(model):
    pool = pool_of(30)
    prompts = [[1, 2], [5, 6, 7], [9]]
    right = [alone(model, prompt, greedy(6)) for prompt in prompts]

    class Breaks(PlainDecoder):
        steps = 0

        def draw(self, requests, logits):
            self.steps += 1
            if self.steps == 3:
                logits[1] = math.nan
            return super().draw(requests, logits)

    loop = Loop(Engine(model, Breaks(model, pool=pool)))
    for sequence, prompt in enumerate(prompts):
        loop.submit(sequence, prompt, greedy(6))
    got, failures = {0: [], 1: [], 2: []}, []
    while not loop.idle:
        for event in loop.step():
            if isinstance(event, Failure):
                failures.append(event.sequence)
            else:
                got[event.sequence].append(event.token)
    assert failures == [1] and tuple(got[0]) == right[0] and tuple(got[2]) == right[2] and len(got[1]) == 2
    assert (pool.free_pages, pool.free_rings) == (30, 5)


def test_a_pool_that_somebody_else_holds(model):
    pool = pool_of(5)
    other = pool.new_cache()
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool)))
    loop.submit(1, [1] * 3, greedy(4))
    assert [type(event) for event in loop.step()] == [Event]
    other.reserve(16)
    loop.step()
    with pytest.raises(CacheFull, match="1 more pages"):
        loop.step()
    other.release()
    assert len(run(loop)[1]) == 2


def test_fp8_pages_through_the_loop_give_what_the_same_cache_gives_alone(model):
    """Rounded keys and values: other tokens than in fp32, but the same ones in any batch."""
    prompts = [[n, 2 * n % 23, 3] for n in range(1, 6)]
    def decode(pages, together):
        pool = pool_of(pages, kv_form="fp8")
        engine = Engine(model, PlainDecoder(model, pool=pool))
        if together:
            return [one.tokens for one in engine.complete(prompts, greedy(20))]
        return [engine.complete([prompt], greedy(20))[0].tokens for prompt in prompts]
    assert decode(8, True) == decode(100, False)
