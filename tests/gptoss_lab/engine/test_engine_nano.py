"""200 greedy tokens of the nano checkpoint are the same by every way of decoding."""
import copy

import pytest
import torch

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.mtp import MtpDecoder
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.model import load_model
from gptoss_lab.model.paged import PagePool

PROMPT = [200006, 1428, 200008, 13225, 200007, 200006, 173781]
TOKENS = 200


@torch.no_grad()
def noisy(model, noise):
    """A draft: the same shapes, every weight of the layers off by so much of its size. The vocabulary is shared."""
    layers, g = copy.deepcopy(model.layers), torch.Generator().manual_seed(0)
    for weight in layers.parameters():
        if weight.is_floating_point():
            weight += noise * weight.float().std(unbiased=False) * torch.randn(weight.shape, generator=g)
    draft = copy.copy(model)
    draft._modules = {**model._modules, "layers": layers}
    return draft


class KnowingHead:
    """Gives the state from which the token after the embedded one is read, as `answer` has it; every fifth is wrong.

    A row of the unembedding is the state nearest to its own token, as rows point in random directions.
    """

    def __init__(self, model, answer):
        self.answer, self.rows = answer, model.unembedding.weight
        self.embedded = model.embedding(torch.tensor(answer))
        self.norm = torch.ones(model.config.hidden_size)

    def __call__(self, z, embedded, eps):
        places = [(self.embedded == row).all(dim=-1).nonzero().flatten().tolist() for row in embedded]
        ahead = [self.answer[min(at[0] + 1, TOKENS - 1)] if at and at[0] % 5 < 4 else 0 for at in places]
        return self.rows[ahead]


def pool(model):
    return PagePool(model.config, pages=40, rings=9, page_size=16, draft=4, dtype=torch.float32, device="cpu")


def greedy(tokens):
    return SamplingParams(temperature=0, max_new_tokens=tokens, stop_ids=())


@pytest.mark.slow
def test_200_greedy_tokens_are_equal():
    model = load_model(ensure_nano(), dtype=torch.float32)
    plain = Engine(model).complete([PROMPT], greedy(TOKENS))[0].tokens
    assert len(plain) == TOKENS and len(set(plain)) > 1
    decoders = {
        "speculative": SpeculativeDecoder(model, noisy(model, 0.01), 4, pool=pool(model), draft_pool=pool(model)),
        "heads": MtpDecoder(model, [KnowingHead(model, plain)] * 3, pool=pool(model)),
    }
    for name, decoder in decoders.items():
        assert Engine(model, decoder).complete([PROMPT], greedy(TOKENS))[0].tokens == plain, name
        assert 0.2 < decoder.acceptance.acceptance < 0.95, name
    many, lengths = [[5, 6, 7], PROMPT, PROMPT[:3], list(range(30))], [20, TOKENS, 15, 12]
    batch = Engine(model, PlainDecoder(model, 24, pool(model))).complete(many, [greedy(n) for n in lengths])
    assert batch[1].tokens == plain
    for prompt, length, done in zip(many, lengths, batch, strict=True):
        assert prompt is PROMPT or done.tokens == Engine(model).complete([prompt], greedy(length))[0].tokens
