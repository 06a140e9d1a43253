"""The training forward is gptoss_lab.model: same weights, same logits, fp32, through the file and back."""
import pytest
import torch
from trained import TINY, random_model, vocabulary

from gptoss_lab.checkpoint import open_checkpoint
from gptoss_lab.checkpoint.compact import expand, write_compact
from gptoss_lab.model import build_model
from gptoss_lab.train.attention import packed
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.model import Pointwise, TrainedModel

LENGTHS = (1, 7, 60, 33)


def forward(model, rows, positions=None, lengths=LENGTHS):
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    if positions is None:
        positions = torch.cat([torch.arange(n) for n in lengths])
    return model(rows, positions, packed("reference", offsets, torch.device("cpu")))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, kept = random_model(), vocabulary()
    file = write_compact(folder / "m.safetensors", TINY, torch.from_numpy(kept.token_ids), released_tensors(model))
    return model, kept, build_model(open_checkpoint(expand(file, folder / "hf")), dtype=torch.float32)


def test_logits_are_the_served_models(served):
    model, kept, other = served
    ids = torch.randint(0, TINY.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, _ = forward(model, torch.from_numpy(kept.compact(ids.tolist())).long())
        mine = model.logits(hidden) - model.offset
    full = other(ids, list(LENGTHS), logits="all")
    assert torch.allclose(mine[:, :-1], full[:, kept.token_ids.tolist()], atol=1e-5, rtol=0)
    unkept = sorted(set(range(TINY.vocab_size)) - set(kept.token_ids.tolist()))
    assert torch.allclose(mine[:, -1:].expand(-1, len(unkept)), full[:, unkept], atol=1e-5, rtol=0)


def test_the_compact_softmax_is_the_full_one(served):
    model, kept, other = served
    ids = torch.arange(sum(LENGTHS)) * 7 % TINY.vocab_size
    with torch.no_grad():
        hidden, _ = forward(model, torch.from_numpy(kept.compact(ids.tolist())).long())
        mine = torch.log_softmax(model.logits(hidden).double(), dim=-1)
    full = torch.log_softmax(other(ids, list(LENGTHS), logits="all").double(), dim=-1)
    assert torch.allclose(mine[:, :-1], full[:, kept.token_ids.tolist()], atol=2e-5, rtol=0)


def test_positions_far_beyond_4096_are_the_served_models(served):
    """A dialogue that begins at a large position, against the served model's cache that stands there."""
    model, _, other = served
    start, rows = 100_000, torch.arange(40)
    ids = torch.tensor(vocabulary().token_ids[:40].tolist())
    with torch.no_grad():
        hidden, _ = forward(model, rows, start + torch.arange(40), (40,))
        mine = model.logits(hidden) - model.offset
    cache = other.new_cache()
    cache.length = start
    full = other(ids, [40], [cache], logits="all")
    # At this position one unit in the last place of an fp32 angle is 0.008 rad; both sides form the same fp32 product.
    assert torch.allclose(mine[:, :-1], full[:, vocabulary().token_ids.tolist()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [
    "layers.0.sinks", "layers.1.qkv_bias", "layers.2.gate_up_bias", "layers.0.down_bias", "layers.1.router_bias",
    "layers.2.attention_norm", "layers.0.down", "layers.1.out_bias",
])
def test_every_part_matters(name):
    rows = torch.arange(30)
    before, after = random_model(), random_model()
    with torch.no_grad():
        after.get_parameter(name).add_(torch.randn(after.get_parameter(name).shape))
        a, b = (m.logits(forward(m, rows, lengths=(30,))[0]) for m in (before, after))
    assert (a - b).abs().max() > 1e-3


def test_gradients_reach_every_parameter_and_are_right():
    model = random_model(stored=False).double()
    model.dtype, rows = torch.float64, torch.arange(40) % 20

    def loss():
        hidden, balance = forward(model, rows, lengths=(25, 15))
        return torch.nn.functional.cross_entropy(model.logits(hidden), rows.roll(-1)) + balance

    loss().backward()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        # The derivative along a random direction, by central differences.
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        right = float((parameter.grad * direction).sum())
        with torch.no_grad():
            values = []
            for step in (1e-5, -2e-5):
                parameter.add_(direction, alpha=step)
                values.append(float(loss()))
            parameter.add_(direction, alpha=1e-5)
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(right, rel=2e-4, abs=2e-6), name


def test_stored_in_training_is_what_the_file_holds():
    loose, rows = random_model(stored=False), torch.arange(30)
    firm = random_model(stored=False)
    firm.store()
    with torch.no_grad():
        loose.stored = False
        plain = loose.logits(forward(loose, rows, lengths=(30,))[0])
        loose.stored = True
        a, b = (m.logits(forward(m, rows, lengths=(30,))[0]) for m in (loose, firm))
    assert torch.equal(a, b) and not torch.allclose(a, plain, atol=1e-3)


def test_one_seed_gives_one_model():
    first, second, other = (TrainedModel(TINY, 10, 5, seed=s).embedding for s in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_without_a_compiler_the_plain_operations_are_used(monkeypatch):
    def refuse(*args, **kwargs):
        def raises(*args):
            raise RuntimeError("no compiler")
        return raises

    monkeypatch.setattr(torch, "compile", refuse)
    pointwise, why = Pointwise.compiled(torch.device("cpu"))
    assert pointwise == Pointwise() and why == "not compiled: RuntimeError: no compiler"
