"""The bf16 peer of the MoE benchmark, in the interpreter, against the plain layer over the same dense matrices."""
import moe_cases
import pytest
import torch

from gptoss_kernels.moe.layer import moe_layer_reference
from gptoss_kernels.reference.experts import ExpertMatrices, dense_matrix
from gptoss_lab.bench import moe_bf16


@pytest.mark.parametrize("tokens", [3, 140])
def test_bf16_chain_is_the_layer(tokens):
    g = torch.Generator().manual_seed(tokens)
    layer = moe_cases.layer(seed=1, dtype=torch.bfloat16)
    dense = moe_bf16.Dense(*(torch.stack([dense_matrix(m, e, torch.bfloat16) for e in range(m.values.shape[0])])
                             for m in (layer.gate_up, layer.down)))
    x = torch.randn(tokens, layer.norm.shape[0], generator=g).bfloat16()
    plain = {name: ExpertMatrices("dense", matrix) for name, matrix in dense._asdict().items()}
    exact = moe_layer_reference(x, moe_cases.layer(seed=1, dtype=torch.bfloat16, **plain))
    ours = moe_bf16.moe_layer_bf16(x, layer, dense)
    assert ours.dtype == torch.bfloat16
    assert moe_cases.relative(ours - x, exact - x) < 2e-2


def test_a_bias_and_a_clamp_count():
    """Gate 10 is clamped to 7; up 1 by its bias: 7 sigmoid(1.702 * 7) * 2."""
    y = torch.zeros(16, 64).bfloat16()
    y[:, 0] = 10
    bias = torch.zeros(2, 64)
    bias[1, 1] = 1.0
    h = moe_bf16.bias_swiglu(y, torch.tensor([1] * 3 + [-1] * 13, dtype=torch.int32), bias, 1.702, 7.0)
    assert h[:3, 0].tolist() == pytest.approx([14.0] * 3, rel=1e-2) and (h[:3, 1:] == 0).all()
