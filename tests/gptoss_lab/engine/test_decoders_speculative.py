"""Speculative decoding: greedy tokens are the plain decoder's, sampled ones follow the model's distribution."""
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import CONFIG, SMALL, VOCAB, Table, blended, random_table, small_model, worse

from gptoss_lab.cost.speculation import tokens_per_round
from gptoss_lab.engine import Engine, LogitsError, Loop, PromptError, SamplingParams
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model.paged import PagePool


def greedy(length=20, **changes):
    return SamplingParams(temperature=0, max_new_tokens=length, **changes)


def speculative(target, draft, k=4, **changes):
    return Engine(target, SpeculativeDecoder(target, draft, k, **changes))


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_tokens_are_those_of_the_plain_decoder(k):
    """200 random prompts of a toy model, in ragged batches, for a draft that is right about half of the time."""
    table = random_table(0, order=2)
    target, draft = Table(table), Table(blended(table, 1, 1.0))
    g = torch.Generator().manual_seed(k)
    prompts = [torch.randint(0, VOCAB, (1 + n % 7,), generator=g).tolist() for n in range(200)]
    params = [greedy(1 + n % 23, stop_ids=(10,) if n % 2 else ()) for n in range(200)]
    engine = speculative(target, draft, k)
    assert engine.complete(prompts, params) == Engine(target).complete(prompts, params)
    counts = engine.decoder.acceptance
    assert 0.2 < counts.acceptance < 0.95 and 1 < counts.tokens_per_round < k + 1


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_that_is_the_model_itself_is_always_right(k):
    """Every round yields k + 1 tokens, the last round what is left; the target runs so many times less often."""
    table = random_table(0, order=2)
    target = Table(table)
    engine = speculative(target, Table(table), k)
    length = 1 + 5 * (k + 1)
    assert engine.complete([[1, 2]], greedy(length, stop_ids=())) == Engine(Table(table)).complete(
        [[1, 2]], greedy(length, stop_ids=()))
    assert engine.decoder.acceptance.acceptance == 1 and engine.decoder.acceptance.tokens_per_round == k + 1
    assert target.calls == [([2], "last")] + 5 * [([k + 1], "all")]


def test_a_draft_that_is_always_wrong_costs_tokens_but_changes_none():
    table = random_table(0)
    engine = speculative(Table(table), Table(-table))
    assert engine.complete([[1]], greedy(stop_ids=())) == Engine(Table(table)).complete([[1]], greedy(stop_ids=()))
    assert engine.decoder.acceptance.accepted == 0 and engine.decoder.acceptance.tokens_per_round == 1


def test_sampled_sequences_follow_the_models_distribution():
    """10,000 sequences of three tokens against the exact joint probabilities: chi-square, 99.9 % quantile.

    The draft differs from the model; rounds begin at the first token or the second, so proposals, replacements and
    bonus tokens all take part."""
    table = random_table(3)
    target, draft = Table(table), Table(blended(table, 4, 1.0))
    count, start = 10_000, 5
    engine = speculative(target, draft, 2)
    params = [SamplingParams(0.8, seed=seed, max_new_tokens=3, stop_ids=()) for seed in range(count)]
    seen = torch.zeros(VOCAB, VOCAB, VOCAB)
    for done in engine.complete([[start]] * count, params):
        seen[done.tokens] += 1
    step = torch.softmax(table.double() / 0.8, dim=-1)
    exact = count * step[start][:, None, None] * step[:, :, None] * step[None]
    order = exact.flatten().argsort(descending=True)[:60]
    counts, expected = seen.flatten()[order].double(), exact.flatten()[order]
    rest = torch.stack([count - counts.sum(), count - expected.sum()])
    assert expected.min() > 10
    square = ((counts - expected) ** 2 / expected).sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert square < 99.6                                        # 60 degrees of freedom
    assert 0.3 < engine.decoder.acceptance.acceptance < 0.95


def test_cuts_hold_for_drafted_tokens_too():
    """top_k 2: no token outside the model's two likeliest ever appears."""
    table = random_table(6)
    engine = speculative(Table(table), Table(blended(table, 7, 2.0)), 3)
    allowed = table.topk(2, dim=-1).indices.tolist()
    for seed in range(50):
        last = 1
        for token in engine.complete([[1]], SamplingParams(1.0, top_k=2, seed=seed, stop_ids=(), max_new_tokens=12)
                                     )[0].tokens:
            assert token in allowed[last]
            last = token


@pytest.mark.parametrize("k", [1, 2, 5])
def test_tokens_per_round_are_what_independent_acceptance_predicts(k):
    """A model that is uniform over a cycle's end and a draft that is right with chance a, independent of all else."""
    right = 0.7
    sure = torch.full((VOCAB, VOCAB), -30.0)
    sure[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 30.0
    unsure = torch.full((VOCAB, VOCAB), -30.0)
    for token in range(VOCAB):
        unsure[token, (token + 1) % VOCAB] = torch.tensor(right).log()
        unsure[token, (token + 2) % VOCAB] = torch.tensor(1 - right).log()
    engine = speculative(Table(sure, dataclasses.replace(CONFIG, max_position_embeddings=5000)),
                         Table(unsure, dataclasses.replace(CONFIG, max_position_embeddings=5000)), k)
    engine.complete([[1]] * 4, [SamplingParams(1.0, seed=s, max_new_tokens=1500, stop_ids=()) for s in range(4)])
    counts = engine.decoder.acceptance
    assert counts.acceptance == pytest.approx(right, abs=0.03)
    assert counts.tokens_per_round == pytest.approx(tokens_per_round(counts.acceptance, k), rel=0.02)
    assert all(share == pytest.approx(right, abs=0.08) for share in counts.by_place)


def test_log_probabilities_are_the_models():
    table = random_table(0)
    params = [greedy(12, stop_ids=(), top_logprobs=3)] * 2
    prompts = [[1, 2], [4]]
    ours = speculative(Table(table), Table(blended(table, 1, 1.0))).complete(prompts, params)
    for one, other in zip(ours, Engine(Table(table)).complete(prompts, params), strict=True):
        assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs)


def test_no_position_beyond_the_last_is_filled():
    """64 positions: a prompt of 60 yields 5 tokens, and no cache is ever longer than 64."""
    table = random_table(0)
    target = Table(table)
    engine = speculative(target, Table(table), 8)
    done = engine.complete([[1] * 60, [2] * 64], greedy(30, stop_ids=()))
    assert [len(one.tokens) for one in done] == [5, 1] and done[0].finish == "context"
    assert max(sum(lengths) for lengths, _ in target.calls) <= 124
    assert [lengths for lengths, kind in target.calls if kind == "all"] == [[4]]


def test_models_that_do_not_fit_together():
    small = dataclasses.replace(CONFIG, vocab_size=7)
    with pytest.raises(ValueError, match="the draft model has 7 token ids and the model 11"):
        speculative(Table(random_table(0)), Table(random_table(0), small))
    with pytest.raises(ValueError, match="the draft model's length is 10 tokens; the model's 64"):
        short = dataclasses.replace(CONFIG, max_position_embeddings=10)
        speculative(Table(random_table(0)), Table(random_table(0), short))
    with pytest.raises(ValueError, match="draft_tokens is 0; at least 1"):
        speculative(Table(random_table(0)), Table(random_table(0)), 0)
    pool = PagePool(CONFIG, pages=3, rings=2, draft=2, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="keep 2 positions more than the window; a draft of 4 needs draft=4"):
        speculative(Table(random_table(0)), Table(random_table(0)), 4, pool=pool)


def test_bad_logits_of_the_draft_end_their_own_sequence():
    table = random_table(0)
    broken = table.clone()
    broken[int(table[3].argmax())] = torch.nan
    engine = speculative(Table(table), Table(broken))
    with pytest.raises(LogitsError, match="sequence 1: the largest logit"):
        engine.complete([[3, 4], [3]], greedy(4, stop_ids=()))


@pytest.fixture(scope="module")
def models():
    """A model with a window of 7, and drafts: itself, a copy with noise, and one of other shapes with a window of 5."""
    target = small_model()
    other = small_model(dataclasses.replace(SMALL, sliding_window=5, num_kv_heads=2, num_layers=3), seed=1)
    return target, [target, worse(target, 0.1), other]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_real_models_with_pages_and_rings_through_the_loop(models, data):
    """Pools of any size that holds the largest sequence, any draft length, a good draft or a bad one: greedy tokens are
    those of the plain decoder alone, and no page is left over."""
    target, draft = models[0], data.draw(st.sampled_from(models[1]), label="draft")
    k, size = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 4, 7]))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=20), min_size=1, max_size=5))
    params = [greedy(data.draw(st.integers(1, 25)), stop_ids=(3,)) for _ in prompts]
    most = max(len(p) + one.max_new_tokens - 1 for p, one in zip(prompts, params, strict=True))
    pools = [
        PagePool(model.config, pages=1 + -(-most // size) + data.draw(st.integers(0, 8)), rings=4, page_size=size,
                 draft=k, dtype=torch.float32, device="cpu")
        for model in (target, draft)
    ]
    decoder = SpeculativeDecoder(target, draft, k, data.draw(st.sampled_from([1, 5, 64])), *pools)
    loop, got = Loop(Engine(target, decoder), max_batch=3), {}
    for n, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        loop.submit(n, prompt, one)
    while not loop.idle:
        for event in loop.step():
            got.setdefault(event.sequence, []).append(event.token)
    for n, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        assert tuple(got[n]) == Engine(target).complete([prompt], one)[0].tokens
    for pool in pools:
        assert (pool.free_pages, pool.free_rings) == (pool.pages - 1, 3)
    if draft is target and decoder.acceptance.proposed:
        assert decoder.acceptance.acceptance == 1


def test_a_request_too_large_for_the_drafts_pool_is_refused(models):
    target, draft = models[0], models[1][2]
    pools = [PagePool(model.config, pages=pages, rings=2, page_size=4, draft=2, dtype=torch.float32, device="cpu")
             for model, pages in ((target, 20), (draft, 4))]
    loop = Loop(Engine(target, SpeculativeDecoder(target, draft, 2, 64, *pools)))
    with pytest.raises(PromptError, match="prompt 1 may come to hold 13 positions, 4 pages of 4; the caches have 3"):
        loop.submit(1, [1] * 9, greedy(5))
    loop.submit(1, [1] * 8, greedy(5))
