"""Rows by expert, the inverse map, softmax before selection, padding, skew: against counting and closed forms."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.moe.layout import padding_share
from gptoss_lab.config import preset
from gptoss_lab.viz import moe_interpreter, moe_padding, moe_rows, moe_skew, moe_softmax

BIG = preset("gpt-oss-120b")


def placed_by_hand(ids, num_experts, align):
    """row_of and token_of by walking experts and tokens one by one."""
    row_of, token_of, at = [[None] * len(ids[0]) for _ in ids], [], 0
    for expert in range(num_experts):
        for token, chosen in enumerate(ids):
            if expert in chosen:
                row_of[token][chosen.index(expert)] = at
                token_of.append(token)
                at += 1
        while at % align:
            token_of.append(-1)
            at += 1
    return row_of, token_of


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(4, 20), st.sampled_from([1, 4, 16, 128]), st.floats(0, 3), st.integers(0, 99))
def test_every_row_lies_where_counting_puts_it(tokens, experts, align, skew, seed):
    ids = moe_rows.sampled_ids(tokens, experts, 4, skew, seed)
    placed = moe_rows.place(ids, experts, align)
    row_of, token_of = placed_by_hand(ids.tolist(), experts, align)
    assert placed.row_of.tolist() == row_of
    assert placed.token_of.tolist() == token_of


def test_combining_through_the_inverse_map_is_the_plain_sum():
    ids = moe_rows.sampled_ids(30, 8, 4)
    placed = moe_rows.place(ids, 8, 16)
    x = torch.randn(30, 5, dtype=torch.float64)
    buffer = torch.full((placed.layout.total, 5), torch.nan, dtype=torch.float64)
    buffer[placed.row_of.flatten()] = (x[:, None] * (1 + ids[..., None])).flatten(0, 1)
    assert torch.allclose(buffer[placed.row_of].sum(1), x * (ids + 1).sum(1, keepdim=True))


def test_sampled_experts_are_distinct_and_the_skew_favours_the_first():
    ids = moe_rows.sampled_ids(500, 32, 4, skew=1.0)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    sizes = moe_rows.expert_sizes(ids, 32)
    assert sum(sizes) == 2000 and sum(sizes[:4]) > 4 * sum(sizes[16:])


def test_the_wrong_order_of_softmax():
    logits = torch.tensor([moe_interpreter.LOGITS], dtype=torch.float64)
    assert moe_softmax.kept_share(logits, 4).item() == pytest.approx(0.982014, abs=1e-6)
    assert moe_softmax.kept_share(torch.zeros(3, 128), 4).tolist() == pytest.approx([4 / 128] * 3)
    assert "1.8 %" in moe_softmax.figure(moe_interpreter.LOGITS, 4).layout.title.text


def test_expected_padding_in_closed_forms():
    assert moe_padding.expected_padding(1, 128, 4, 128) == pytest.approx(127)
    assert moe_padding.expected_padding(777, 128, 4, 1) == pytest.approx(0, abs=1e-9)
    assert moe_padding.expected_padding(100, 4, 4, 128) == pytest.approx(0.28)
    p = 4 / 32                                                          # two tokens: both, one or none choose an expert
    assert moe_padding.expected_padding(2, 32, 4, 2) == pytest.approx(32 * 2 * (1 - (1 - p) ** 2) / 8 - 1)


@pytest.mark.parametrize("align", [16, 128])
def test_expected_padding_is_what_random_routings_show(align):
    shares = [padding_share(moe_rows.expert_sizes(moe_rows.sampled_ids(256, 32, 4, seed=s), 32), align)
              for s in range(60)]
    mean = sum(shares) / len(shares)
    spread = math.sqrt(sum((s - mean) ** 2 for s in shares) / len(shares) / (len(shares) - 1))
    assert abs(mean - moe_padding.expected_padding(256, 32, 4, align)) < 4 * spread + 1e-9


def test_whole_blocks():
    frame = moe_padding.fit_table([("K", 2880, 128), ("N", 5760, 192)]).frame
    assert frame["blocks"].tolist() == ["22.5", "30"] and frame["extra work, %"].tolist() == ["2.22", "0.00"]
    assert moe_padding.largest_even_block(2880, 256) == moe_padding.largest_even_block(5760, 256) == 192


def test_the_busiest_rank():
    assert moe_skew.busiest_rank([1, 1, 1, 1], 2) == 1
    assert moe_skew.busiest_rank([4, 0, 0, 0], 4) == 4
    assert moe_skew.busiest_rank([3, 1, 0, 0], 2) == 2


def test_skew_table_matches_its_routing():
    frame = moe_skew.skew_table(BIG, tokens=512, skews=(0.0, 2.0)).frame
    sizes = moe_rows.expert_sizes(moe_rows.sampled_ids(512, 128, 4, 2.0), 128)
    assert frame["largest expert, % of rows"].tolist()[1] == f"{100 * max(sizes) / 2048:.1f}"
    hit = [int(n) for n in frame["experts hit at batch 32"]]
    assert hit[1] < hit[0] <= 128


def test_the_kernel_in_the_interpreter_agrees():
    rows = moe_interpreter.run()
    assert len(rows) == 6 and all(row["placed"] and row["error"] < 1e-6 for row in rows)
    assert rows[0]["shown"] == "0: 0.643914, 1: 0.236883, 2: 0.087144, 3: 0.032059"
    assert rows[1]["shown"].startswith("0: 0.632333") and rows[2]["shown"].startswith("1: 0.25")


@pytest.mark.parametrize("call", [
    lambda: moe_padding.expected_padding(0, 128, 4, 128), lambda: moe_padding.expected_padding(1, 4, 5, 128),
    lambda: moe_padding.largest_even_block(61, 256), lambda: moe_skew.busiest_rank([1, 1, 1], 2),
    lambda: moe_skew.busiest_rank([0, 0], 2),
])
def test_bad_input(call):
    with pytest.raises(ValueError, match="at least 1|no multiple|equal ranges"):
        call()
