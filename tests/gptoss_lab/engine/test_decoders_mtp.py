"""Heads on the hidden state: the form that training makes, greedy equality, heads that are always right, bad files."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from toy_models import small_model

from gptoss_lab.engine import Engine, Loop, SamplingParams
from gptoss_lab.engine.decoders.mtp import Head, MtpDecoder, load_heads
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.request import Request
from gptoss_lab.model.paged import PagePool
from gptoss_lab.train.mtp import PredictionHeads, save_heads


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def heads_file(model, tmp_path_factory):
    """Two untrained heads as training saves them."""
    file = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    save_heads(PredictionHeads(model.config.hidden_size, model.config.rms_norm_eps, seed=3), file)
    return file


def greedy(length=20, **changes):
    return SamplingParams(temperature=0, max_new_tokens=length, **changes)


def zero_head(model):
    """Changes nothing: its logits are the model's own at the same state."""
    h = model.config.hidden_size
    return Head(torch.zeros(4, 2 * h), torch.zeros(h, 4), torch.ones(h))


@torch.inference_mode()
def test_the_hidden_state_is_what_the_logits_are_read_from(model):
    ids = torch.tensor([1, 5, 9, 2])
    for kind, rows in (("last", 2), ("all", 4)):
        logits, state = model(ids, [3, 1], logits=kind, hidden=True)
        assert state.shape == (rows, model.config.hidden_size)
        assert torch.equal(logits, model.unembedding(state)) and torch.equal(logits, model(ids, [3, 1], logits=kind))
    assert model(ids, logits="none", hidden=True) is None


@torch.inference_mode()
def test_proposals_are_those_of_the_trained_form(model, heads_file):
    """Against the module that trains heads, given the states of a plain pass and the tokens themselves."""
    trained = PredictionHeads(model.config.hidden_size, model.config.rms_norm_eps, seed=3)
    for p in trained.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    decoder = MtpDecoder(model, load_heads(heads_file, model))
    prompt = [4, 8, 15, 16, 1, 22]
    request = Request(0, list(prompt), greedy(), frozenset(), 100)
    decoder.start(request)
    (first,), = decoder.step([request])
    request.take(first)
    logits, hidden = model(torch.tensor(prompt), hidden=True)
    assert first.token == int(logits.argmax())
    proposal, = decoder.propose([request], [2])
    ahead = torch.tensor([[first.token, proposal.tokens[0]]])
    states = trained(hidden, model.embedding(ahead))
    assert [int(model.unembedding(state).argmax()) for state in states] == proposal.tokens


@torch.inference_mode()
def test_the_state_kept_after_a_round_is_that_of_the_token_before_the_newest(model):
    """Against a whole pass after every round, with heads that are right often enough for rounds of every kind."""
    answer = Engine(model).complete([[4, 8]], greedy(40, stop_ids=()))[0].tokens
    rows = torch.nn.functional.normalize(model.unembedding.weight, dim=-1)

    class Knowing:
        norm = torch.ones(model.config.hidden_size)

        def __call__(self, z, embedded, eps):
            place = len(request.tokens) - 2 + self.ahead
            self.ahead += 1
            return 50 * rows[[answer[min(place, 39)] if place % 3 else 0]]

    knowing = Knowing()
    decoder, accepted = MtpDecoder(model, [knowing] * 3), set()
    request = Request(0, [4, 8], greedy(40), frozenset(), 100)
    decoder.start(request)
    while request.left > 0:
        knowing.ahead = 0
        found, = decoder.step([request])
        accepted.add(len(found) - 1)
        for new in found:
            request.take(new)
        hidden = model(torch.tensor(request.tokens[:-1]), hidden=True)[1][0]
        assert torch.allclose(request.state.hidden.flatten(), hidden, atol=1e-4)
    assert tuple(request.tokens[2:]) == answer and accepted >= {0, 2}


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_greedy_tokens_are_those_of_the_plain_decoder(model, heads_file, data):
    """Any arrival, chunk and pool: with heads, as training saves them, and with pages and rings."""
    prompts = data.draw(st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=20), min_size=1, max_size=5))
    params = [greedy(data.draw(st.integers(1, 25)), stop_ids=(3,)) for _ in prompts]
    most = max(len(p) + one.max_new_tokens - 1 for p, one in zip(prompts, params, strict=True))
    pool = PagePool(model.config, pages=1 + -(-most // 4) + data.draw(st.integers(0, 9)), rings=4, page_size=4, draft=2,
                    dtype=torch.float32, device="cpu")
    decoder = MtpDecoder(model, load_heads(heads_file, model), data.draw(st.sampled_from([1, 2, 5, 64])), pool)
    loop, got = Loop(Engine(model, decoder)), {}
    for n, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        loop.submit(n, prompt, one)
        for event in loop.step():
            got.setdefault(event.sequence, []).append(event.token)
    while not loop.idle:
        for event in loop.step():
            got.setdefault(event.sequence, []).append(event.token)
    for n, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        assert tuple(got[n]) == Engine(model, PlainDecoder(model)).complete([prompt], one)[0].tokens
    assert (pool.free_pages, pool.free_rings) == (pool.pages - 1, 3)


def test_heads_that_are_always_right(model):
    """Where the model repeats one token for ever, a head that changes nothing is right: 4 tokens a round."""
    steady = small_model()
    with torch.no_grad():
        steady.unembedding.weight.zero_()                       # all logits 0: token 0 for ever
    decoder = MtpDecoder(steady, [zero_head(steady)] * 3)
    done = Engine(steady, decoder).complete([[1, 2]], greedy(1 + 5 * 4, stop_ids=()))
    assert done == Engine(steady).complete([[1, 2]], greedy(1 + 5 * 4, stop_ids=()))
    counts = decoder.acceptance
    assert (counts.rounds, counts.proposed, counts.accepted, counts.tokens_per_round) == (5, 15, 15, 4)


def test_sampled_first_tokens_follow_the_models_distribution(model, heads_file):
    """4000 seeds, the second new token given the first: chi-square over the likeliest pairs and the rest."""
    count = 4000
    decoder = MtpDecoder(model, load_heads(heads_file, model))
    params = [SamplingParams(seed=seed, max_new_tokens=3, stop_ids=()) for seed in range(count)]
    done = Engine(model, decoder).complete([[4, 8]] * count, params)
    with torch.inference_mode():
        first = torch.softmax(model(torch.tensor([4, 8]))[0].double(), -1)
        rows = [torch.softmax(model(torch.tensor([4, 8, token]))[0].double(), -1) for token in range(23)]
    exact = count * first[:, None] * torch.stack(rows)
    seen = torch.zeros_like(exact)
    for one in done:
        seen[one.tokens[0], one.tokens[1]] += 1
    order = exact.flatten().argsort(descending=True)[:30]
    counts, expected = seen.flatten()[order], exact.flatten()[order]
    rest = torch.stack([count - counts.sum(), count - expected.sum()])
    assert expected.min() > 5
    square = ((counts - expected) ** 2 / expected).sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    assert square < 59.7                                        # 30 degrees of freedom, 99.9 % quantile
    assert decoder.acceptance.accepted > 0


def test_bad_files(model, tmp_path):
    h = model.config.hidden_size
    good = {"heads.0.expand": torch.zeros(6, 2 * h), "heads.0.project": torch.zeros(h, 6)}
    good["heads.0.norm"] = torch.ones(h)

    def load(tensors):
        save_file(tensors, tmp_path / "heads.safetensors")
        return load_heads(tmp_path / "heads.safetensors", model)

    assert len(load(good)) == 1
    with pytest.raises(ValueError, match="lacks heads.0.norm"):
        load({name: t for name, t in good.items() if "norm" not in name})
    with pytest.raises(ValueError, match="lacks heads.0.expand"):
        load({name.replace("0", "1"): t for name, t in good.items()})
    with pytest.raises(ValueError, match=r"head 0 has shapes .*; \[F, 64\], \[32, F\] and \[32\] fit the model"):
        load(good | {"heads.0.norm": torch.ones(h + 1)})
    with pytest.raises(ValueError, match="holds no heads; heads.0.expand"):
        load({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="cannot be read as heads"):
        load_heads(tmp_path / "absent.safetensors", model)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="cannot be read as heads"):
        load_heads(tmp_path / "text", model)
    with pytest.raises(ValueError, match="there are 0 heads"):
        MtpDecoder(model, [])
