"""bf16 against fp32, the router's switch, and the dtypes that the parts of a model have.

Measured on four random layers, root mean square of a row's error over that of its logits: where every expert is chosen,
so that no choice can flip, 0.9 % for the median row and 1.7 % for the worst; with top 3 of 5, 1 to 2 % for the median
row and up to 50 % for a row whose experts (or those of tokens it attends to) flipped, as 1 to 8 % of the rows' do.
"""
import pytest
import torch
from random_models import config, random_source, tokens

from gptoss_lab.model import Recorder
from gptoss_lab.model.load import build_model


def bf16_error(c, seed):
    """[T] relative error of each row of bf16 logits, and [T] whether its experts are the same in every layer."""
    source, ids = random_source(c, seed), tokens(c, 100, seed)
    wide, narrow = Recorder("router_ids"), Recorder("router_ids")
    exact = build_model(source, dtype=torch.float32)(ids, logits="all", observe=wide)
    got = build_model(source, dtype=torch.bfloat16)(ids, logits="all", observe=narrow)
    assert got.dtype == torch.float32
    same = wide.stacked("router_ids").sort(-1)[0] == narrow.stacked("router_ids").sort(-1)[0]
    return (got - exact).norm(dim=-1) / exact.norm(dim=-1), same.all(-1).all(0)


@pytest.mark.parametrize("seed", range(4))
def test_bf16_without_choice(seed):
    error, same = bf16_error(config(experts_per_token=5), seed)
    assert same.all()
    assert 0 < error.median() <= 0.01
    assert error.max() <= 0.02


@pytest.mark.parametrize("seed", range(4))
def test_bf16_with_choice(seed):
    error, same = bf16_error(config(), seed)
    assert same.double().mean() >= 0.9
    assert error.median() <= 0.03


def test_dtypes():
    source = random_source(config())
    model = build_model(source, dtype=torch.bfloat16, expert_storage="stored")
    block = model.layers[0]
    assert block.attention.qkv.weight.dtype == block.attention.out.bias.dtype == torch.bfloat16
    assert block.attention.sinks.dtype == block.attention_norm.weight.dtype == torch.float32
    assert block.moe.router.weight.dtype == torch.float32
    assert block.moe.gate_up.values.dtype == torch.uint8 and block.moe.gate_up.bias.dtype == torch.bfloat16
    assert model.new_cache().layers[1].keys.dtype == torch.bfloat16
    assert torch.equal(block.attention.sinks.bfloat16(), source.tensors["model.layers.0.self_attn.sinks"])


def test_router_dtype_rounds_logits_and_weights():
    c = config(num_layers=2)
    source, ids = random_source(c), tokens(c, 50)
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        recorder = Recorder()
        build_model(source, dtype=torch.float32, router_dtype=dtype)(ids, observe=recorder)
        seen[dtype] = recorder
    wide, narrow = seen[torch.float32], seen[torch.bfloat16]
    for name in ("router_logits", "router_weights"):
        assert wide.stacked(name).dtype == torch.float32 and narrow.stacked(name).dtype == torch.bfloat16
    exact, rounded = wide.stacked("router_logits")[0], narrow.stacked("router_logits")[0].float()
    assert 0 < (exact - rounded).abs().max() < 0.01 * exact.abs().max()
    assert not torch.equal(exact, exact.bfloat16().float())


def test_router_dtype_decides_near_ties():
    """Two experts a bf16 rounding apart: fp32 takes the larger, bf16 sees a tie and takes the lower id."""
    c = config(num_layers=1, experts_per_token=1)
    source = random_source(c)
    source.tensors["model.layers.0.mlp.router.weight"].zero_()
    # Equal biases in bf16; the weights of expert 3 add a thousandth of the bias to its logit.
    source.tensors["model.layers.0.mlp.router.bias"].copy_(torch.tensor([0, 0, 8, 8, 0]))
    source.tensors["model.layers.0.mlp.router.weight"][3].fill_(2**-13)
    source.tensors["model.layers.0.post_attention_layernorm.weight"].fill_(1)
    chosen = {}
    for dtype in (torch.float32, torch.bfloat16):
        recorder = Recorder("router_ids", "router_logits")
        build_model(source, dtype=torch.float32, router_dtype=dtype)(tokens(c, 20), observe=recorder)
        chosen[dtype] = recorder.stacked("router_ids").flatten()
    assert set(chosen[torch.bfloat16].tolist()) == {2}
    assert set(chosen[torch.float32].tolist()) == {2, 3}
