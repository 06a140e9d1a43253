"""Everything stored matters: each kind of tensor, the window, the sink, the ramp. What must not matter does not."""
import dataclasses

import pytest
import torch
from random_models import Memory, config, distance, random_source, tokens

from gptoss_lab.model.load import build_model

CONFIG = config(num_layers=2)
COUNT = 40


@pytest.fixture(scope="module")
def source():
    return random_source(CONFIG)


@pytest.fixture(scope="module")
def ids():
    """Random ids; the first is 0, so that row 0 of the embedding is used."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), tokens(CONFIG, COUNT - 1)])


def logits(source, ids):
    return build_model(source, dtype=torch.float64)(ids, logits="all")


@pytest.fixture(scope="module")
def base(source, ids):
    return logits(source, ids)


def at_zero(tensor):
    """One entry changed: the first one of whatever the tensor holds."""
    tensor.view(-1)[0] += 2 if tensor.dtype == torch.uint8 else 0.5
    return tensor


NAMES = [f"model.layers.{n}.{name}" for n in (0, 1) for name in (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks",
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias",
    "mlp.router.weight", "mlp.router.bias",
    "mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales", "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales", "mlp.experts.down_proj_bias",
)] + ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_one_entry_of_every_tensor(source, ids, base, name):
    """One changed entry moves the logits by far more than rounding (1e-14 here). Expert 0 is in use."""
    assert distance(logits(source.changed(name, at_zero), ids), base) > 1e-5


def test_every_sink_of_every_head(source, ids, base):
    for n in range(2):
        for head in range(CONFIG.num_heads):
            def raise_one(sinks, head=head):
                sinks[head] += 1
                return sinks

            changed = source.changed(f"model.layers.{n}.self_attn.sinks", raise_one)
            assert distance(logits(changed, ids), base) > 1e-4


def test_last_row_of_both_halves_of_qkv(source, ids, base):
    """The last query head and the last key head are used, so heads are neither dropped nor repeated."""
    for x in "qkv":
        def last(bias):
            bias[-1] += 1
            return bias

        assert distance(logits(source.changed(f"model.layers.1.self_attn.{x}_proj.bias", last), ids), base) > 1e-4


def test_window_matters_only_beyond_it(source, ids, base):
    wider = logits(Memory(dataclasses.replace(CONFIG, sliding_window=8), source.tensors), ids)
    assert distance(wider[:7], base[:7]) <= 1e-13
    assert distance(wider[7:8], base[7:8]) > 1e-4


def test_reach_of_a_key_is_the_window():
    """One sliding layer of window 7: the token at 10 is seen by queries 10..16 and by no other."""
    c = config(num_layers=1)
    model, ids = build_model(random_source(c), dtype=torch.float64), tokens(c, 30)
    other = ids.clone()
    other[10] = (other[10] + 1) % c.vocab_size
    moved = (model(ids, logits="all") - model(other, logits="all")).abs().amax(dim=-1) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(10, 17))


def test_even_layers_slide_and_odd_layers_do_not():
    """With a second, full layer the last query sees every token through it."""
    c = config(num_layers=2)
    model, ids = build_model(random_source(c), dtype=torch.float64), tokens(c, 30)
    assert [block.attention.window for block in model.layers] == [7, None]
    other = ids.clone()
    other[0] = (other[0] + 1) % c.vocab_size
    assert distance(model(other), model(ids)) > 1e-6


def test_future_tokens_do_not_matter(source, ids, base):
    other = ids.clone()
    other[-1] = (other[-1] + 1) % CONFIG.vocab_size
    changed = logits(source, other)
    assert distance(changed[:-1], base[:-1]) <= 1e-13
    assert distance(changed[-1:], base[-1:]) > 1e-3


def test_ramp_rounding_shows_at_long_positions(source):
    """The unrounded ramp differs from the rounded one, and more so far from the start."""
    rounded = Memory(dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, truncate=True)), source.tensors)
    ids = tokens(CONFIG, 1500)
    moved = (logits(source, ids) - logits(rounded, ids)).abs().amax(dim=-1)
    assert moved[1000:].mean() > 3 * moved[:20].mean() > 0


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-2}, {"swiglu_limit": 1.0}, {"swiglu_alpha": 1.0}, {"experts_per_token": 2}], ids=str
)
def test_constants_of_the_config(source, ids, base, change):
    assert distance(logits(Memory(dataclasses.replace(CONFIG, **change), source.tensors), ids), base) > 1e-3


def test_sinks_of_minus_infinity_are_no_sinks(source, ids, base):
    """They change the result, and very small finite ones give the same as none."""
    names = [f"model.layers.{n}.self_attn.sinks" for n in range(2)]
    none, small = source, source
    for name in names:
        none = none.changed(name, lambda s: torch.full_like(s, -torch.inf))
        small = small.changed(name, lambda s: torch.full_like(s, -1e4))
    without = logits(none, ids)
    assert torch.isfinite(without).all()
    assert distance(without, base) > 1e-2
    assert distance(without, logits(small, ids)) <= 1e-13
