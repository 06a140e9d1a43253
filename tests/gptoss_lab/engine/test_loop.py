"""Continuous batching: any arrival order gives each sequence exactly the tokens that it gets alone."""
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import drive

from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, Event, Failure, LogitsError, Loop, PromptError, SamplingError, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.model import load_model

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"  # 4 layers, window 6, 8 experts, 320 ids
VOCAB = 11
CONFIG = dataclasses.replace(
    preset("nano"), vocab_size=VOCAB, max_position_embeddings=40, eos_token_ids=(10,), pad_token_id=0
)


@pytest.fixture(scope="module")
def model():
    return load_model(TINY / "hf", dtype=torch.float32)


class Successor:
    """After token t the likeliest is t + 1. `bad` maps the length of a sequence to what its logits become, once."""

    config, device = CONFIG, torch.device("cpu")

    def __init__(self, bad=None):
        self.bad, self.batches, self.live = dict(bad or {}), [], 0

    def new_cache(self, capacity):
        return SimpleNamespace(length=0, seen=[], capacity=capacity)

    def __call__(self, token_ids, lengths, caches, *, logits):
        self.batches.append(list(lengths))
        rows = []
        for cache, new in zip(caches, token_ids.split(list(lengths)), strict=True):
            cache.seen += new.tolist()
            cache.length += len(new)
            rows.append([5.0 if token == (cache.seen[-1] + 1) % VOCAB else 0.0 for token in range(VOCAB)])
            if tuple(cache.seen) in self.bad:
                rows[-1] = [self.bad.pop(tuple(cache.seen))] * VOCAB
        return torch.tensor(rows) if logits == "last" else None


def greedy(length=5, **changes):
    return SamplingParams(temperature=0, max_new_tokens=length, **changes)


def drain(loop):
    """{sequence: its tokens}, {sequence: how it ended} of everything until the loop is idle."""
    tokens, ends = {}, {}
    while not loop.idle:
        for event in loop.step():
            assert event.sequence not in ends, "an event after the last one"
            if isinstance(event, Failure):
                ends[event.sequence] = event.message
            else:
                tokens.setdefault(event.sequence, []).append(event.token)
                if event.finish is not None:
                    ends[event.sequence] = event.finish
    return tokens, ends


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_arrival_order_gives_each_sequence_the_tokens_it_gets_alone(model, data):
    """Prompts arrive at any step, some are cancelled at any step, the batch and the chunks are small or large."""
    prompts = data.draw(st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=18), min_size=1, max_size=6))
    arrival = [data.draw(st.integers(0, 12)) for _ in prompts]
    cancelled = {i: data.draw(st.integers(0, 20)) for i in range(len(prompts)) if data.draw(st.booleans())}
    warm = [data.draw(st.sampled_from([0.0, 0.0, 1.0])) for _ in prompts]
    params = [SamplingParams(heat, seed=i, max_new_tokens=2 + 2 * i, stop_ids=()) for i, heat in enumerate(warm)]
    engine = Engine(model, PlainDecoder(model, data.draw(st.sampled_from([1, 4, 1000]))))
    loop = Loop(engine, max_batch=data.draw(st.integers(1, 4)), max_positions=data.draw(st.sampled_from([60, None])))
    got, ended, left = drive(loop, prompts, params, arrival, cancelled)
    assert loop.running == loop.waiting == 0
    for i, prompt in enumerate(prompts):
        alone = Engine(model).complete([prompt], params[i])[0].tokens
        if i in left:
            assert tuple(got[i]) == alone[: len(got[i])]
        else:
            assert i in ended and tuple(got[i]) == alone


def test_a_sequence_joins_between_steps_and_one_row_becomes_free_for_the_next():
    model = Successor()
    loop = Loop(Engine(model), max_batch=2)
    loop.submit(1, [3, 4], greedy(3))
    assert loop.step() == [Event(1, 5)]
    loop.submit(2, [8], greedy(9))
    loop.submit(3, [0, 0, 0], greedy(1))
    assert loop.step() == [Event(1, 6), Event(2, 9)] and (loop.running, loop.waiting) == (2, 1)
    assert loop.step() == [Event(1, 7, None, "length"), Event(2, 10, None, "stop")]
    assert loop.step() == [Event(3, 1, None, "length")] and loop.idle
    assert loop.step() == []
    assert model.batches == [[2], [1, 1], [1, 1], [3]]


def test_positions_of_the_batch_are_limited_first_come_first_served():
    """12 positions: 4 + 5 - 1 = 8 and 2 + 5 - 1 = 6 do not fit together; the short one behind them waits its turn."""
    loop = Loop(Engine(Successor()), max_positions=12)
    for sequence, prompt in ((1, [1] * 4), (2, [2] * 2), (3, [3])):
        loop.submit(sequence, prompt, greedy(5 if sequence < 3 else 1))
    assert [event.sequence for event in loop.step()] == [1]
    assert (loop.running, loop.waiting) == (1, 2)
    tokens, ends = drain(loop)
    assert tokens == {1: [3, 4, 5, 6], 2: [3, 4, 5, 6, 7], 3: [4]} and set(ends.values()) == {"length"}
    with pytest.raises(PromptError, match="prompt 9 may come to hold 13 positions; the caches have 12 in all"):
        loop.submit(9, [1] * 9, greedy(5))
    loop.submit(9, [1] * 8, greedy(5))


def test_cancelling_waiting_running_and_unknown_sequences():
    loop = Loop(Engine(Successor()), max_batch=1)
    for sequence in (1, 2, 3):
        loop.submit(sequence, [sequence], greedy(4))
    assert loop.step() == [Event(1, 2)]
    assert loop.cancel(2) and loop.cancel(1) and not loop.cancel(1) and not loop.cancel(77)
    assert drain(loop)[0] == {3: [4, 5, 6, 7]}


def test_bad_logits_end_their_own_sequence_and_the_others_lose_nothing():
    model = Successor(bad={(2, 3, 4): math.nan, (5, 6): math.inf})
    loop = Loop(Engine(model))
    for sequence, prompt in ((4, [0, 1]), (5, [2]), (6, [5]), (7, [1])):
        loop.submit(sequence, prompt, greedy(6, stop_ids=()))
    tokens, ends = drain(loop)
    assert tokens == {4: [2, 3, 4, 5, 6, 7], 5: [3, 4], 6: [6], 7: [2, 3, 4, 5, 6, 7]}
    assert ends[5] == "sequence 5: the largest logit for position 3 is nan; a finite number is expected"
    assert ends[6].startswith("sequence 6: the largest logit for position 2 is inf")
    assert ends[4] == ends[7] == "length"


def test_logits_that_are_nobodys_are_not_hidden():
    class Broken:
        def start(self, request):
            request.state = None

        def step(self, batch):
            raise LogitsError("all is lost")

    loop = Loop(Engine(Successor(), Broken()))
    loop.submit(1, [1])
    with pytest.raises(LogitsError, match="all is lost"):
        loop.step()


def test_a_decoder_may_find_several_tokens_and_what_follows_the_last_is_dropped():
    class Three(PlainDecoder):
        def step(self, batch):
            return [[dataclasses.replace(new, token=(new.token + i) % VOCAB) for i in range(3)]
                    for (new,) in super().step(batch)]

    loop = Loop(Engine(Successor(), Three(Successor())))
    loop.submit(1, [7], greedy(9))
    assert loop.step() == [Event(1, 8), Event(1, 9), Event(1, 10, None, "stop")] and loop.idle


def test_bad_input_is_refused_when_submitted():
    loop = Loop(Engine(Successor()))
    loop.submit(1, [1])
    with pytest.raises(PromptError, match="sequence 1 is still running; each needs a number of its own"):
        loop.submit(1, [2])
    loop.step()
    with pytest.raises(PromptError, match="sequence 1 is still running"):
        loop.submit(1, [2])
    with pytest.raises(PromptError, match="prompt 2 is empty"):
        loop.submit(2, [])
    with pytest.raises(SamplingError, match="stop id 11 is out of range"):
        loop.submit(2, [1], greedy(stop_ids=(11,)))
    assert loop.waiting == 0
    for wrong in ({"max_batch": 0}, {"max_positions": 0}):
        with pytest.raises(ValueError, match="is 0; at least 1"):
            Loop(Engine(Successor()), **wrong)


def test_likeliest_tokens_come_with_their_log_probabilities(model):
    """Against the softmax of a pass of the model without any engine."""
    params = [greedy(1, top_logprobs=3), greedy(1, logprobs=True), greedy(1)]
    loop = Loop(Engine(model))
    for sequence, one in enumerate(params):
        loop.submit(sequence, [5, 6, 7], one)
    first, second, third = loop.step()
    with torch.inference_mode():
        exact = torch.log_softmax(model(torch.tensor([5, 6, 7]))[0].double(), dim=-1)
    best = exact.topk(3)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert first.logprob == first.top[0][1] and first.token == first.top[0][0]
    assert second.logprob == pytest.approx(first.logprob) and second.top == ()
    assert third.logprob is None and third.top == ()
    for wrong in (-1, 21, 1.5, True):
        with pytest.raises(SamplingError, match="sampling top_logprobs is .* a whole number from 0 to 20"):
            SamplingParams(top_logprobs=wrong)
