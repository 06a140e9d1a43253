"""RMSNorm and YaRN against exact values and float64."""
import math

import numpy as np
import pytest
import torch

from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.rope import apply_rope, rope_concentration, rope_frequencies, rope_ramp, rope_table

GPT_OSS = {"theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_context": 4096}


# -- RMSNorm ---------------------------------------------------------------------------------------------------------
def test_norm_values():
    """x = [3, 4]: mean square 12.5."""
    got = rms_norm(torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([1.0, 2.0]), eps=0.0)
    assert got[0].tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], rel=1e-15)


def test_norm_epsilon_is_inside_the_root():
    got = rms_norm(torch.full((1, 4), 1e-3, dtype=torch.float64), torch.ones(4), eps=1e-5)
    assert got[0, 0].item() == pytest.approx(1e-3 / math.sqrt(1e-6 + 1e-5), rel=1e-14)


def test_norm_multiplies_before_the_one_rounding():
    """bf16 output is the fp64 result rounded once; rounding before the weight gives something else for many values."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=g).bfloat16(), (1 + torch.randn(96, generator=g)).bfloat16()
    once = rms_norm(x.double(), weight.double()).bfloat16()
    got = rms_norm(x, weight)
    assert got.dtype == torch.bfloat16
    twice = rms_norm(x, torch.ones(96)) * weight
    assert (got != once).double().mean() < 1e-3        # fp32 against fp64 may differ where a value is nearly a tie
    assert (twice != once).double().mean() > 0.1


def test_norm_wrong_weight():
    with pytest.raises(ValueError, match=r"weight has shape \[3\]; x needs \[4\]"):
        rms_norm(torch.zeros(2, 4), torch.ones(3))


# -- YaRN ------------------------------------------------------------------------------------------------------------
def test_ramp_is_not_rounded():
    low, high = rope_ramp(64, **GPT_OSS)
    assert low == pytest.approx(8.092779115512402, rel=1e-14) and high == pytest.approx(17.39802450158856, rel=1e-14)
    assert rope_ramp(64, **GPT_OSS, truncate=True) == (8.0, 18.0)


def test_ramp_must_lie_in_the_head():
    with pytest.raises(ValueError, match="ramp runs from pair -0.784 to"):
        rope_ramp(32, 10000.0, 16.0, 1.0, 64)


def test_concentration():
    assert rope_concentration(32.0) == pytest.approx(1.3465735902799727, rel=1e-15)
    assert rope_concentration(1.0) == 1.0


def test_frequencies():
    omega = rope_frequencies(64).tolist()
    for pair, value in {
        8: 5.081327482e-02, 9: 3.170569618e-02, 10: 1.933500113e-02, 11: 1.159204926e-02, 12: 6.794959490e-03,
        13: 3.860359317e-03, 14: 2.093792379e-03, 15: 1.052602101e-03, 16: 4.564839192e-04, 17: 1.293187012e-04,
        18: 3.830881237e-05, 31: 3.023511428e-07,
    }.items():
        assert omega[pair] == pytest.approx(value, rel=1e-9)
    for pair in range(9):
        assert omega[pair] == pytest.approx(150000.0 ** (-2 * pair / 64), rel=1e-14)


def test_rounding_the_ramp_changes_pairs_9_to_17():
    exact, rounded = rope_frequencies(64), rope_frequencies(64, truncate=True)
    change = (rounded / exact - 1).tolist()
    assert [pair for pair, c in enumerate(change) if abs(c) > 1e-12] == list(range(9, 18))
    assert change[12] == pytest.approx(0.00701571 / 0.00679496 - 1, abs=1e-5)
    assert change[17] == pytest.approx(0.763, abs=5e-4)
    assert rounded[17].item() == pytest.approx(2.279478e-4, rel=1e-6)


def test_table_takes_the_fp32_product():
    """The angle is an fp32 product: near 1e5 it is off the float64 one by up to half an ulp, its cosine is accurate."""
    omega = rope_frequencies(64)
    positions = torch.tensor([0, 1, 4096, 99_991, 131_071])
    cos, sin = rope_table(positions, omega, 1.5)
    angle = positions.numpy().astype(np.float32)[:, None] * omega.numpy().astype(np.float32)[None, :]
    assert angle.dtype == np.float32 and cos.dtype == torch.float32 and cos.shape == (5, 32)
    np.testing.assert_allclose(cos, 1.5 * np.cos(angle.astype(np.float64)), atol=3e-7)
    np.testing.assert_allclose(sin, 1.5 * np.sin(angle.astype(np.float64)), atol=3e-7)
    assert cos[0].tolist() == [1.5] * 32 and sin[0].tolist() == [0.0] * 32


def test_halves_turn_together():
    """Pair i joins elements i and i + D/2, and a turn by 90 degrees sends (1, 0) to (0, 1)."""
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    x[0, 1, 2] = 1.0
    cos, sin = torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    cos[0, 2], sin[0, 2] = 0.0, 1.0
    expected = torch.zeros_like(x)
    expected[0, 1, 6] = 1.0
    assert torch.equal(apply_rope(x, cos, sin), expected)
    assert torch.equal(apply_rope(expected, cos, sin), -x)


def test_turned_products_depend_on_the_distance():
    """q at m and k at n: the product of the complex pairs turned by (m - n) omega, times the concentration squared."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, generator=g, dtype=torch.float64) for _ in range(2))
    omega = rope_frequencies(64)

    def turned(x, position):
        angle = position * omega[None]
        return apply_rope(x, angle.cos() * 1.3, angle.sin() * 1.3)[0, 0]

    def paired(x):
        return x[0, 0, :32].numpy() + 1j * x[0, 0, 32:].numpy()

    for m, n in ((5, 3), (1000, 998), (7, 7)):
        expected = 1.69 * (paired(q) * paired(k).conj() * np.exp(1j * (m - n) * omega.numpy())).sum().real
        assert (turned(q, m) @ turned(k, n)).item() == pytest.approx(expected, rel=1e-10)


def test_rope_rounds_once():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 64, generator=g).bfloat16()
    cos, sin = rope_table(torch.arange(7), rope_frequencies(64), 1.3)
    got = apply_rope(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert (got != apply_rope(x.double(), cos, sin).bfloat16()).double().mean() < 2e-3
