"""FP8 against packed MXFP4: bytes by closed form, one crossing, and on which side decode and prefill lie."""
import pytest

from gptoss_lab.cost import CostError, Plan, Precision, prefill_bound
from gptoss_lab.cost.formats import crossover_tokens, expert_bytes_touched, format_table

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_bytes_touched_by_closed_form(b20, tokens):
    distinct = 32 * (1 - (7 / 8) ** tokens)
    scales = 4 * (45 * 23 + 23 * 23)                    # fp32, one per block of [5760, 2880] and [2880, 2880]
    per_expert = {"mxfp4": 13_219_200 + 17_280, "fp8": 24_883_200 + scales + 17_280, "bf16": 49_766_400 + 17_280}
    for weight_format, size in per_expert.items():
        assert expert_bytes_touched(b20, tokens, weight_format) == pytest.approx(24 * distinct * size)


def test_decode_pays_for_fp8_at_every_batch(config):
    rows = format_table(config, 8192, BATCHES)
    assert [row.batch for row in rows] == list(BATCHES)
    for row in rows:
        assert 1.2 < row.fp8_over_mxfp4 < 1.7
        assert row.fp8_expert_bytes / row.mxfp4_expert_bytes == pytest.approx(1.88, abs=0.01)
        gap = row.fp8_step_bytes - row.mxfp4_step_bytes
        assert gap == pytest.approx(row.fp8_expert_bytes - row.mxfp4_expert_bytes)      # nothing else differs
        assert row.fp8_expert_bytes == pytest.approx(expert_bytes_touched(config, row.batch, "fp8"))


def test_the_crossing_is_where_the_two_limits_meet(config):
    """Packed: FLOPs at the bf16 rate. FP8 there still waits for its bytes. All experts are read on both sides."""
    tokens = crossover_tokens(config)
    per_layer = config.num_experts * (24_883_200 + 6_256 + 17_280) / 4.8e12
    per_token = 4 * 2 * 24_883_200 / 989e12
    assert tokens == pytest.approx(per_layer / per_token, rel=2e-3)
    assert 800 < tokens < 3400


@pytest.mark.parametrize("plan", [Plan(), Plan(4, 1, 4), Plan(1, 1, 8), Plan(8, 8, 1)], ids=str)
def test_fp8_loses_below_the_crossing_and_wins_from_it_on(b20, plan):
    tokens = crossover_tokens(b20, plan=plan)

    def fp8_wins(n):
        seconds = []
        for experts in ("fp8", "mxfp4"):
            limit = prefill_bound(b20, 1, n, Precision(experts=experts), plan)
            seconds.append(limit["experts_gate_up"].seconds + limit["experts_down"].seconds)
        return seconds[0] < seconds[1]

    assert [fp8_wins(n) for n in range(1, tokens)] == [False] * (tokens - 1)
    assert all(fp8_wins(n) for n in range(tokens, 4 * tokens, 7))


def test_unpacked_to_fp8_the_packed_format_never_loses(config):
    assert crossover_tokens(config, Precision(mxfp4_unit="fp8")) is None
    assert crossover_tokens(config, most=100) is None
    with pytest.raises(CostError, match="most is 0"):
        crossover_tokens(config, most=0)
