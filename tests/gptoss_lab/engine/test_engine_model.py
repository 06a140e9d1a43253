"""The engine on the real model code: tiny weights in fp32, where a batch and one alone differ by rounding at most."""
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.model import load_model

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"  # 4 layers, window 6, 8 experts, 320 ids


@pytest.fixture(scope="module")
def model():
    return load_model(TINY / "hf", dtype=torch.float32)


def greedy(length, **changes):
    return SamplingParams(temperature=0, max_new_tokens=length, stop_ids=(), **changes)


def by_full_passes(model, prompt, length):
    """Greedy decoding without cache, batch or engine: the whole sequence again for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(torch.tensor(tokens)).argmax()))
    return tuple(tokens[len(prompt):])


def test_first_token_equals_the_float64_reference(model):
    """`ref_logits.npy` was made by an independent forward pass in float64."""
    ids, reference = np.load(TINY / "ids.npy").ravel(), np.load(TINY / "ref_logits.npy").reshape(-1, 320)
    prompts = [ids[: n + 1].tolist() for n in range(len(ids))]
    done = Engine(model).complete(prompts, greedy(1, logprobs=True))
    assert [c.tokens[0] for c in done] == reference.argmax(axis=-1).tolist()
    exact = reference.max(axis=-1) - np.log(np.exp(reference).sum(axis=-1))
    assert [c.logprobs[0] for c in done] == pytest.approx(exact.tolist(), abs=1e-4)


@settings(max_examples=6, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=20), min_size=1, max_size=5),
    step_tokens=st.sampled_from([1, 3, 7, 1000]),
)
def test_greedy_tokens_of_a_batch_are_those_of_each_prompt_alone(model, prompts, step_tokens):
    lengths = [3 + 2 * index for index in range(len(prompts))]  # so that sequences leave at different steps
    engine = Engine(model, PlainDecoder(model, step_tokens))
    together = engine.complete(prompts, [greedy(n) for n in lengths])
    for prompt, length, completion in zip(prompts, lengths, together, strict=True):
        assert completion.tokens == Engine(model).complete([prompt], greedy(length))[0].tokens
        assert completion.tokens == by_full_passes(model, prompt, length)


@settings(max_examples=5, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=9), min_size=2, max_size=4),
    temperature=st.sampled_from([0.7, 1.0, 1.5]), top_k=st.sampled_from([0, 5]), top_p=st.sampled_from([0.8, 1.0]),
)
def test_seeded_draws_do_not_depend_on_the_rest_of_the_batch(model, prompts, temperature, top_k, top_p):
    params = [
        SamplingParams(temperature, top_k, top_p, seed=10 + index, max_new_tokens=6, stop_ids=())
        for index in range(len(prompts))
    ]
    together = [c.tokens for c in Engine(model).complete(prompts, params)]
    backwards = [c.tokens for c in Engine(model).complete(prompts[::-1], params[::-1])][::-1]
    alone = [Engine(model).complete([prompt], one)[0].tokens for prompt, one in zip(prompts, params, strict=True)]
    assert together == backwards == alone


def test_one_prompt_many_seeds_follows_the_models_distribution(model):
    """2000 first tokens against the model's own probabilities: chi-square over the 12 likeliest ids and the rest."""
    prompt, count = [5, 6, 7], 2000
    with torch.inference_mode():
        probabilities = torch.softmax(model(torch.tensor(prompt))[0].double(), dim=-1)
    params = [SamplingParams(seed=seed, max_new_tokens=1, stop_ids=()) for seed in range(count)]
    tokens = [c.tokens[0] for c in Engine(model).complete([prompt] * count, params)]
    seen = torch.bincount(torch.tensor(tokens), minlength=320).double()
    likeliest = probabilities.topk(12).indices
    counts = torch.cat([seen[likeliest], (count - seen[likeliest].sum())[None]])
    expected = count * torch.cat([probabilities[likeliest], (1 - probabilities[likeliest].sum())[None]])
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 32.91  # 12 degrees of freedom, 99.9 % quantile
    spread = (seen - count * probabilities).square().sum() / (count * probabilities * (1 - probabilities)).sum()
    assert 0.7 < spread < 1.3  # all 320 ids: the mean squared error is that of independent draws


def test_a_prompt_longer_than_the_window_and_a_batch_with_a_short_one(model):
    long = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    done = Engine(model, PlainDecoder(model, step_tokens=16)).complete([long, [3]], greedy(8))
    assert [c.tokens for c in done] == [by_full_passes(model, long, 8), by_full_passes(model, [3], 8)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_engine_on_a_gpu_in_fp32_gives_the_tokens_of_the_cpu(model):
    prompts = [[5, 6, 7], [8], list(range(40))]
    on_gpu = Engine(load_model(TINY / "hf", device="cuda", dtype=torch.float32)).complete(prompts, greedy(12))
    assert [c.tokens for c in on_gpu] == [c.tokens for c in Engine(model).complete(prompts, greedy(12))]
