"""Scheduler and cache as a state machine: requests come, are cancelled, steps happen, in any order hypothesis finds."""
from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from toy_models import SMALL, small_model

from gptoss_lab.engine import Engine, Loop, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model.paged import PagePool

PROMPTS = [[1], [2, 3, 4], [9, 8, 7, 6, 5], list(range(9)), [7] * 21]
LENGTHS = [1, 9, 13, 16]

PREEMPTED: list[int] = []
"""How often each run of the machine preempted."""


@cache
def model():
    return small_model()


@cache
def right(prompt, length):
    """What a request yields alone."""
    params = SamplingParams(temperature=0, max_new_tokens=length, stop_ids=())
    return Engine(model()).complete([PROMPTS[prompt]], params)[0].tokens


class Machine(RuleBasedStateMachine):
    """12 pages of 3 hold the largest request (36 positions) and nothing beside, so preemption is frequent."""

    @initialize(drafts=st.booleans(), rings=st.sampled_from([1, 3, 4]), batch=st.sampled_from([2, 3, 5]),
                step_tokens=st.sampled_from([1, 5, 30]))
    def begin(self, drafts, rings, batch, step_tokens):
        self.pools = [
            PagePool(SMALL, pages=13, rings=rings + 1, page_size=3, draft=3, dtype=torch.float32, device="cpu")
            for _ in range(1 + drafts)
        ]
        decoder = (SpeculativeDecoder(model(), model(), 3, step_tokens, *self.pools) if drafts
                   else PlainDecoder(model(), step_tokens, self.pools[0]))
        self.loop = Loop(Engine(model(), decoder), batch)
        self.asked, self.got, self.ended, self.count = {}, {}, set(), 0

    @rule(requests=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(LENGTHS)), min_size=1, max_size=4))
    def submit(self, requests):
        for prompt, length in requests:
            params = SamplingParams(temperature=0, max_new_tokens=length, stop_ids=())
            self.loop.submit(self.count, PROMPTS[prompt], params)
            self.asked[self.count], self.got[self.count] = (prompt, length), []
            self.count += 1

    @rule(data=st.data())
    def cancel(self, data):
        sequence = self.count - data.draw(st.integers(0, 8), label="the how many youngest")
        was_there = sequence in self.asked and sequence not in self.ended
        assert self.loop.cancel(sequence) == was_there
        self.ended.add(sequence) if was_there else None

    @rule(times=st.integers(1, 9))
    def step(self, times):
        for _ in range(times):
            for event in self.loop.step():
                assert event.sequence not in self.ended
                self.got[event.sequence].append(event.token)
                if event.finish is not None:
                    self.ended.add(event.sequence)
                    assert tuple(self.got[event.sequence]) == right(*self.asked[event.sequence])

    @invariant()
    def tokens_are_a_beginning_of_the_right_ones(self):
        for sequence, tokens in getattr(self, "got", {}).items():
            assert tuple(tokens) == right(*self.asked[sequence])[: len(tokens)]

    @invariant()
    def every_page_has_one_holder_and_none_is_lost(self):
        if not hasattr(self, "loop"):
            return
        requests = list(self.loop.scheduler._running.values())
        for n, pool in enumerate(self.pools):
            held = [page for r in requests for page in r.state.caches[n].pages]
            everything = sorted([*held, *pool._free_pages])
            assert everything == list(range(1, 13))
            rings = [page for r in requests for page in r.state.caches[n].ring]
            assert len(set(rings)) == len(rings) == len(requests) * pool.ring_pages
            assert min(rings, default=pool.ring_pages) >= pool.ring_pages
            assert pool.free_rings + len(requests) == pool.rings - 1
        assert all(r.state is None for r in self.loop.scheduler._waiting)

    @invariant()
    def first_come_first_served(self):
        if hasattr(self, "loop"):
            order = [*self.loop.scheduler.running, *self.loop.scheduler.waiting]
            assert order == sorted(order) and set(order) == set(self.asked) - self.ended

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for _ in range(2000):
            if self.loop.idle:
                break
            self.step(1)
        assert self.loop.idle
        PREEMPTED.append(self.loop.scheduler.preemptions)
        assert all(pool.free_pages == 12 and pool.free_rings == pool.rings - 1 for pool in self.pools)




def test_any_order_of_events():
    PREEMPTED.clear()
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
    assert sum(PREEMPTED) > 20                                  # or the machine has not tried what it is for
