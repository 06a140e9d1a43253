"""The engine on a model made of a table: what it feeds, when it stops, what it refuses. No weights needed."""
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, Event, LogitsError, PromptError, SamplingError, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.request import NewToken

VOCAB = 11
CONFIG = dataclasses.replace(
    preset("nano"), vocab_size=VOCAB, max_position_embeddings=40, eos_token_ids=(10,), pad_token_id=0
)


class Successor:
    """After token t the likeliest is t + 1, whatever came before. Records every call."""

    config, device = CONFIG, torch.device("cpu")

    def __init__(self, logit=5.0):
        self.logit, self.calls, self.capacities = logit, [], []

    def new_cache(self, capacity):
        self.capacities.append(capacity)
        return SimpleNamespace(length=0, seen=[])

    def __call__(self, token_ids, lengths, caches, *, logits):
        self.calls.append((list(lengths), logits))
        assert sum(lengths) == len(token_ids) and min(lengths) > 0
        rows = []
        for cache, new in zip(caches, token_ids.split(list(lengths)), strict=True):
            cache.seen += new.tolist()
            cache.length += len(new)
            rows.append([self.logit if token == (cache.seen[-1] + 1) % VOCAB else 0.0 for token in range(VOCAB)])
        return torch.tensor(rows) if logits == "last" else None


def greedy(**changes):
    return SamplingParams(temperature=0, **changes)


def test_ragged_batch_step_by_step():
    """Stop id 10 ends two sequences at different steps; each leaves the batch and the rest go on."""
    model = Successor()
    events = list(Engine(model).generate([[7, 8], [3], [0, 0, 0]], greedy(max_new_tokens=5)))
    assert events == [
        Event(0, 9), Event(1, 4), Event(2, 1),
        Event(0, 10, None, "stop"), Event(1, 5), Event(2, 2),
        Event(1, 6), Event(2, 3),
        Event(1, 7), Event(2, 4),
        Event(1, 8, None, "length"), Event(2, 5, None, "length"),
    ]
    assert [lengths for lengths, _ in model.calls] == [[2, 1, 3], [1, 1, 1], [1, 1], [1, 1], [1, 1]]


def test_complete_collects_in_the_order_of_the_prompts():
    done = Engine(Successor()).complete([[1], [8]], [greedy(max_new_tokens=3), greedy(max_new_tokens=9)])
    assert [c.tokens for c in done] == [(2, 3, 4), (9, 10)]
    assert [c.finish for c in done] == ["length", "stop"]
    assert [c.logprobs for c in done] == [(None,) * 3, (None,) * 2]
    assert Engine(Successor()).complete([]) == []


def test_stop_ids_replace_the_models_own():
    engine = Engine(Successor())
    assert engine.complete([[7]], greedy(stop_ids=(9, 4)))[0].tokens == (8, 9)
    without = engine.complete([[7]], greedy(stop_ids=(), max_new_tokens=6))[0]
    assert without.tokens == (8, 9, 10, 0, 1, 2) and without.finish == "length"


def test_model_length_ends_a_sequence():
    """40 positions: a prompt of 38 can be followed by three tokens, the last of which is never fed back."""
    done = Engine(Successor()).complete([[1] * 38, [1] * 40], greedy(stop_ids=(), max_new_tokens=9))
    assert [len(c.tokens) for c in done] == [3, 1] and [c.finish for c in done] == ["context", "context"]


def test_caches_are_made_for_what_a_sequence_may_become():
    model = Successor()
    Engine(model).complete([[1, 2], [1] * 39], greedy(max_new_tokens=7))
    assert model.capacities == [2 + 7, 39 + 2]


def test_long_prompts_are_read_in_chunks_while_others_decode():
    model = Successor()
    engine = Engine(model, PlainDecoder(model, step_tokens=4))
    done = engine.complete([[1] * 6, [2, 2], [5]], greedy(max_new_tokens=3))
    assert [c.tokens for c in done] == [(2, 3, 4), (3, 4, 5), (6, 7, 8)]
    # step 1: sequence 2 has one token to feed, so it goes first; sequence 0 fills the rest of the budget
    assert model.calls[:3] == [([3, 1], "last"), ([3, 1], "last"), ([1, 2, 1], "last")]
    model.calls.clear()
    engine.complete([[1] * 9], greedy(max_new_tokens=1))
    assert model.calls == [([4], "none"), ([4], "none"), ([1], "last")]
    with pytest.raises(ValueError, match="step_tokens is 0; at least 1"):
        PlainDecoder(model, step_tokens=0)


def test_logprobs_are_given_where_asked_for():
    two = [SamplingParams(temperature=0, logprobs=True, max_new_tokens=1), greedy(max_new_tokens=1)]
    first, second = Engine(Successor(logit=math.log(30.0))).complete([[1], [1]], two)
    assert first.logprobs == pytest.approx((math.log(30 / 40),)) and second.logprobs == (None,)


def test_equal_seeds_draw_equal_tokens_and_none_is_fresh():
    flat = Engine(Successor(logit=0.0))
    def draw(seed):
        return flat.complete([[1]], SamplingParams(seed=seed, max_new_tokens=20, stop_ids=()))[0].tokens
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


def test_a_decoder_may_find_several_tokens_and_what_follows_a_stop_is_dropped():
    class Three:
        def start(self, request):
            request.state = None

        def step(self, batch):
            return [[NewToken((r.tokens[-1] + i) % VOCAB) for i in (1, 2, 3)] for r in batch]

    engine = Engine(Successor(), Three())
    done = engine.complete([[6], [1], [8]], [greedy(), greedy(max_new_tokens=4), greedy(stop_ids=(0,))])
    assert [c.tokens for c in done] == [(7, 8, 9, 10), (2, 3, 4, 5), (9, 10, 0)]
    assert [c.finish for c in done] == ["stop", "length", "stop"]


def test_closing_the_iterator_stops_the_work():
    model = Successor()
    stream = Engine(model).generate([[1]], greedy())
    next(stream)
    stream.close()
    assert len(model.calls) == 1


def test_prompts_may_be_any_sequence_of_whole_numbers():
    engine = Engine(Successor())
    for prompt in ((1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), 2], range(1, 3)):
        assert engine.complete([prompt], greedy(max_new_tokens=1))[0].tokens == (3,)


@pytest.mark.parametrize(("prompts", "message"), [
    ([[1], []], "prompt 1 is empty; at least one token id is expected"),
    ([[1], [2, 11]], "prompt 1: token id 11 at position 1 is out of range; ids are 0..10"),
    ([[-1]], "prompt 0: token id -1 at position 0 is out of range; ids are 0..10"),
    ([[1, 2.0]], "prompt 0: 2.0 at position 1 is not a token id"),
    ([[1, None]], "prompt 0: None at position 1 is not a token id"),
    ([[1] * 41], "prompt 0 has 41 tokens; the model's length is 40"),
    ([1, 2], "prompt 0 is 1; a list of token ids is expected"),
    (["hello"], "prompt 0 is 'hello'; a list of token ids is expected"),
])
def test_bad_prompts_are_refused_before_anything_runs(prompts, message):
    model = Successor()
    with pytest.raises(PromptError) as caught:
        Engine(model).generate(prompts, greedy())
    assert str(caught.value) == message and isinstance(caught.value, ValueError)
    assert model.calls == [] and model.capacities == []


def test_id_201088_of_the_released_vocabulary_is_refused():
    """The chat library defines this id, one past the model's last row."""
    model = SimpleNamespace(config=preset("gpt-oss-20b"), device=torch.device("cpu"))
    with pytest.raises(PromptError, match=r"^prompt 0: token id 201088 at position 2 is out .* ids are 0\.\.201087$"):
        Engine(model).generate([[5, 201087, 201088]])


def test_bad_sampling_is_refused_before_anything_runs():
    engine = Engine(Successor())
    with pytest.raises(SamplingError, match="sampling has 1 entries for 2 prompts; one for each is expected"):
        engine.generate([[1], [2]], [greedy()])
    with pytest.raises(SamplingError, match=r"sequence 1: stop id 11 is out of range; ids are 0\.\.10"):
        engine.generate([[1], [2]], [greedy(), greedy(stop_ids=(3, 11))])


def test_nan_logits_end_with_an_error_that_names_the_sequence():
    """What came before the bad step has been yielded."""
    class Breaks(Successor):
        def __call__(self, token_ids, lengths, caches, *, logits):
            result = super().__call__(token_ids, lengths, caches, logits=logits)
            if len(self.calls) == 3:
                result[1, 4] = math.nan
            return result

    stream = Engine(Breaks()).generate([[9], [1, 2], [1]], greedy())
    seen = []
    with pytest.raises(LogitsError) as caught:
        seen.extend(stream)
    # sequence 0 has left, so the bad row 1 is sequence 2, which has 1 + 2 tokens
    assert str(caught.value) == "sequence 2: the largest logit for position 3 is nan; a finite number is expected"
    assert [(event.sequence, event.token) for event in seen] == [(0, 10), (1, 3), (2, 2), (1, 4), (2, 3)]
