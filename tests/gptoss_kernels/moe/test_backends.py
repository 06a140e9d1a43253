"""What the backends refuse, and why: no GPU needed."""
from types import SimpleNamespace

import pytest
import torch

from gptoss_kernels.moe import LayerWeights
from gptoss_kernels.moe.decode_cuda import decode_gemm
from gptoss_kernels.moe.gemm_cuda import check_operands
from gptoss_kernels.moe.layer import moe_layer_reference
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_kernels.registry import BackendUnavailable, choose, why_not


def fp8(*shape):
    return torch.zeros(*shape).to(torch.float8_e4m3fn)


def good_operands():
    scale = torch.ones(3, 128).t()
    return {"a": fp8(128, 320), "a_scale": scale, "b": fp8(2, 96, 320), "b_scale": torch.ones(2, 1, 3),
            "bias": torch.zeros(2, 96), "counts": torch.zeros(2, dtype=torch.int32)}


def test_good_operands_pass():
    check_operands(**good_operands())


@pytest.mark.parametrize(("name", "value", "message"), [
    ("a", fp8(100, 320), "multiple of 128"),
    ("a", torch.zeros(128, 320), "float8_e4m3fn"),
    ("b", fp8(2, 96, 288), "equal K"),
    ("a_scale", torch.ones(128, 3), "column-major"),
    ("b_scale", torch.ones(2, 1, 2), "b_scale"),
    ("bias", torch.zeros(2, 96).bfloat16(), "bias"),
    ("counts", torch.zeros(2), "counts"),
])
def test_bad_operands(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_operands(**{**good_operands(), name: value})


@pytest.mark.parametrize("skewed", ["scales", "bias"])
def test_what_a_decode_product_copies_in_bulk_must_be_aligned(skewed):
    given = {"scales": torch.zeros(2 * 64 * 2 + 1, dtype=torch.uint8), "bias": torch.zeros(2 * 64 + 1)}
    begin = {name: int(name == skewed) for name in given}
    scales, bias = (of[begin[name] : begin[name] + of.numel() - 1] for name, of in given.items())
    codes = ExpertMatrices("mxfp4", torch.zeros(2, 64, 2, 16, dtype=torch.uint8), scales.view(2, 64, 2))
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        decode_gemm(fp8(16, 64), torch.ones(16, 1), codes, bias.view(2, 64), SimpleNamespace(align=16))


def test_why_not():
    assert "NVIDIA GPU" in why_not("moe_layer", "cuda", device="cpu", expert_form="fp8")
    assert "dense" in why_not("moe_layer", "cuda", device="cpu", expert_form="dense")
    assert "multiples of 64" in why_not("moe_layer", "cuda", device="cpu", expert_form="fp8", hidden_size=2900)
    assert why_not("moe_layer", "reference", device="cpu", expert_form="dense") is None
    with pytest.raises(BackendUnavailable, match="cannot run here"):
        choose("moe_layer", "cuda", device="cpu", expert_form="fp8")


def test_layer_weights_must_fit():
    def dense(e):
        return ExpertMatrices("dense", torch.zeros(e, 8, 4))

    fields = {"norm": torch.ones(4), "router": torch.zeros(6, 4), "router_bias": torch.zeros(6), "gate_up": dense(3),
              "gate_up_bias": torch.zeros(3, 8), "down": dense(3), "down_bias": torch.zeros(3, 4)}
    LayerWeights(**fields)
    for change, message in (({"gate_up": dense(2)}, "gate_up has 2 experts"),
                            ({"down_bias": torch.zeros(3, 5)}, "biases"),
                            ({"first_expert": 4}, "among the router's")):
        with pytest.raises(ValueError, match=message):
            LayerWeights(**{**fields, **change})


def test_reference_layer_against_transformers():
    """The whole layer in fp32 against transformers' own gpt-oss MoE block and norm."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP, GptOssRMSNorm

    config = transformers.GptOssConfig(hidden_size=24, intermediate_size=40, num_local_experts=6, num_experts_per_tok=4,
                                       num_hidden_layers=1, vocab_size=8, head_dim=8, num_attention_heads=2,
                                       num_key_value_heads=1)
    torch.manual_seed(0)
    block, norm = GptOssMLP(config), GptOssRMSNorm(24, 1e-5)
    with torch.no_grad():
        for p in [*block.parameters(), *norm.parameters()]:
            p.copy_(torch.randn_like(p))
    x = torch.randn(11, 24)
    experts = block.experts
    weights = LayerWeights(
        norm.weight.data, block.router.weight.data, block.router.bias.data,
        ExpertMatrices("dense", experts.gate_up_proj.data.transpose(1, 2)), experts.gate_up_proj_bias.data,
        ExpertMatrices("dense", experts.down_proj.data.transpose(1, 2)), experts.down_proj_bias.data)
    with torch.no_grad():
        want = block(norm(x)[None])[0][0] + x
    ours = moe_layer_reference(x, weights)
    assert ((ours - want).norm() / want.norm()) < 1e-5
