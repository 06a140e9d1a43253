"""Every decoder, the engine and the loop on the fast forward: the tokens of the plain model, whoever comes when."""
import pytest
import torch
from random_models import config, random_source, tokens

from gptoss_lab.engine import Engine, Loop, SamplingParams
from gptoss_lab.engine.decoders.mtp import Head, MtpDecoder
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.model.load import build_model

SHORT = {"max_position_embeddings": 512}
PROMPTS = [tokens(config(), n, n).tolist() for n in (5, 20, 9, 33, 1, 14)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=14, stop_ids=())


@pytest.fixture(scope="module")
def alone():
    engine = Engine(build_model(random_source(config(**SHORT)), dtype=torch.float32))
    return [engine.complete([prompt], GREEDY)[0].tokens for prompt in PROMPTS]


def fast(seed=0, sequences=6, held=400, draft=0, **changes):
    weights = lay_out(random_source(config(**SHORT, **changes), seed), "cpu", torch.float32, experts="dense")
    pool = make_pool(weights, tokens=held, sequences=sequences, page_size=4, draft=draft)
    return FastTransformer(weights, pool, sizes=(1, 2, 4, 8), max_kv_len=128)


def decoder_of(kind, held=400):
    model = fast(draft=3, held=held)
    if kind == "plain":
        return model, PlainDecoder(model, step_tokens=16, pool=model.pool)
    if kind == "speculative":
        small = fast(seed=1, draft=3, num_layers=2, sliding_window=5)
        return model, SpeculativeDecoder(model, small, 3, 16, model.pool, small.pool)
    g, h = torch.Generator().manual_seed(0), model.config.hidden_size
    heads = [Head(torch.randn(32, 2 * h, generator=g) / h**0.5, torch.randn(h, 32, generator=g) / 6, torch.ones(h))
             for _ in range(2)]
    return model, MtpDecoder(model, heads, 16, model.pool)


@pytest.mark.parametrize("kind", ["plain", "speculative", "mtp"])
def test_a_batch_yields_what_each_prompt_yields_alone(kind, alone):
    model, decoder = decoder_of(kind)
    found = [done.tokens for done in Engine(model, decoder).complete(PROMPTS, GREEDY)]
    assert found == alone


@pytest.mark.parametrize("kind", ["plain", "speculative"])
@pytest.mark.parametrize(("seed", "held"), [(0, 400), (1, 60), (2, 40)])
def test_arrivals_cancels_and_preemption_change_no_token(kind, seed, held, alone):
    """Sequences come in any order and leave half-way; a small pool makes some read again. Nothing is leaked."""
    model, decoder = decoder_of(kind, held)
    loop, g = Loop(Engine(model, decoder), max_batch=5), torch.Generator().manual_seed(seed)
    order, found = torch.randperm(len(PROMPTS), generator=g).tolist(), {}
    free = model.pool.free_pages, model.pool.free_rings
    cancelled = order[2]
    while order or not loop.idle:
        if order and torch.rand(1, generator=g) < 0.5:
            sequence = order.pop(0)
            loop.submit(sequence, PROMPTS[sequence], GREEDY)
        for event in loop.step():
            found.setdefault(event.sequence, []).append(event.token)
        if len(found.get(cancelled, ())) >= 3:
            loop.cancel(cancelled)
    for sequence, expected in enumerate(alone):
        got = tuple(found[sequence])
        assert got == expected if sequence != cancelled else got == expected[: len(got)]
    assert (model.pool.free_pages, model.pool.free_rings) == free
