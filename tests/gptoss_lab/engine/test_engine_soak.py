"""Thousands of random requests with cancels through a small pool: every token right, no page left over."""
import random

import pytest
import torch
from toy_models import SMALL, small_model

from gptoss_lab.engine import Engine, Loop, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.model.paged import PagePool


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind():
    """Arrivals in bursts, some cancelled at a random moment, prompts of 1 to 20 and answers of 1 to 40 tokens."""
    draw, model = random.Random(0), small_model()
    kinds = [([draw.randrange(23) for _ in range(draw.randint(1, 20))], draw.randint(1, 40)) for _ in range(60)]
    params = [SamplingParams(temperature=0, max_new_tokens=length, stop_ids=(3,)) for _, length in kinds]
    right = [one.tokens for one in Engine(model).complete([prompt for prompt, _ in kinds], params)]
    pool = PagePool(SMALL, pages=61, rings=33, page_size=4, dtype=torch.float32, device="cpu")
    loop = Loop(Engine(model, PlainDecoder(model, 256, pool)), max_batch=40)
    got, kind_of, cancelled, finished, count = {}, {}, set(), 0, 0
    while count < 2000 or not loop.idle:
        if count < 2000 and loop.waiting < 30 and draw.random() < 0.5:
            for _ in range(draw.randint(1, 20)):
                kind_of[count] = draw.randrange(60)
                got[count] = []
                loop.submit(count, kinds[kind_of[count]][0], params[kind_of[count]])
                count += 1
        for sequence in [s for s in got if draw.random() < 0.004]:
            assert loop.cancel(sequence)
            cancelled.add(sequence)
            assert tuple(got[sequence]) == right[kind_of[sequence]][: len(got.pop(sequence))]
        for event in loop.step():
            got[event.sequence].append(event.token)
            if event.finish is not None:
                assert tuple(got.pop(event.sequence)) == right[kind_of[event.sequence]]
                finished += 1
    assert finished + len(cancelled) == count >= 2000 and len(cancelled) > 200
    assert loop.scheduler.preemptions > 100
    assert (pool.free_pages, pool.free_rings) == (60, 32)
