"""Every MoE figure is titled, marked, labelled and small; tables of timings say what is not recorded."""

import pytest
import torch
from figure_checks import check_figure

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.viz import (
    moe_bias,
    moe_decode,
    moe_epilogue,
    moe_padding,
    moe_precision,
    moe_promotion,
    moe_rows,
    moe_skew,
    moe_softmax,
    moe_times,
)

SMALL, BIG = preset("gpt-oss-20b"), preset("gpt-oss-120b")
FIGURES = {
    "softmax": lambda: moe_softmax.figure([3, 2, 1, 0, -1], 2),
    "map": lambda: moe_rows.map_figure(moe_rows.sampled_ids(6, 4, 2), 4, 4),
    "rows": lambda: moe_rows.rows_figure(32, 128, 4, 16, 1.0),
    "costs": lambda: moe_bias.costs_figure((1, 128, 8192), 4, 5760, 2880, 128),
    "errors": lambda: moe_bias.errors_figure((0.5, 1)),
    "promotion": lambda: moe_promotion.figure(moe_promotion.example(8, 128, 256), (12, 14, 24)),
    "padding": lambda: moe_padding.figure([SMALL, BIG]),
    "holders": moe_epilogue.holders_figure,
    "decode": lambda: moe_decode.figure([SMALL, BIG]),
    "skew": lambda: moe_skew.figure(BIG, 512),
    "offset": lambda: moe_precision.offset_figure((16,), (0, 8)),
}
WITHOUT_Y_TITLE = ("map", "holders")        # rows named on the axis


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_titled_marked_labelled_and_small(name):
    figure = FIGURES[name]()
    check_figure(figure, name not in WITHOUT_Y_TITLE)


def test_titles_say_what_is_drawn():
    assert "24 %" in FIGURES["padding"]().layout.title.text and "12 %" in FIGURES["padding"]().layout.title.text
    assert "82 of 128" in FIGURES["decode"]().layout.title.text
    rows = FIGURES["rows"]()
    assert sum(rows.data[0].y) == 128 and (sum(rows.data[0].y) + sum(rows.data[1].y)) % 16 == 0


def row(case, backend, value, peer=None, metric="microseconds", unit="us", **of):
    return results.make_row("moe", case, backend, metric, [] if value is None else [value], unit, bound=50.0, peer=peer,
                            tokens=8192, **of)


def test_absent_cases_say_so_and_present_ones_are_ordered():
    names = moe_times.cases("layer", decode=False)
    assert "layer/E128/T8192/uniform" in names and not any("T32/" in n for n in names)
    rows = [row(names[0], "deepgemm chain", 120.0), row(names[0], "cuda", 100.0, ("deepgemm chain", 120.0)),
            row(names[0], "cuda", 900.0, metric="tflops", unit="TFLOP/s"),
            row(names[0], "torch", None, failed="no room")]
    frame = moe_times.times_table(rows, names).frame
    assert frame["backend"].tolist()[:4] == ["cuda", "deepgemm chain", "torch", "not recorded yet"]
    assert frame["against its peer"][0] == "1.20 x deepgemm chain" and frame["rate"][0] == "900 TFLOP/s"
    assert frame["% of bound"][0] == "50" and frame["time, us"][2] == "failed: no room"
    assert len(frame) == len(names) + 2


def test_what_the_bias_costs():
    assert "not recorded yet" in str(moe_times.bias_table([]))
    slow, fast = ([t * clock for clock in (1.0, 1.3, 1.0, 0.9)] for t in (101.0, 100.0))    # clocks move, both alike
    rows = [row("gemm1/x", "cuda", 101.0) | {"raw": slow}, row("gemm1/x", "cuda without bias", 100.0) | {"raw": fast}]
    [(case, with_bias, without, costs)] = moe_times.bias_costs(rows)
    assert (case, with_bias, without) == ("gemm1/x", 101.0, 100.0) and costs == pytest.approx([1.0] * 4)
    assert moe_times.bias_table(rows).frame["in half of the rounds, %"].tolist() == ["+1.00 to +1.00"]
    assert moe_times.bias_costs(rows[1:]) == []


def test_the_products_beside_each_other():
    rows = [row("gemm1/x", "cuda", 100.0), row("gemm1/x", "deepgemm", 95.0),
            row("gemm1/x", "torch bf16 grouped_mm", 210.0)]
    frame = moe_times.products_table(rows, ["gemm1/x", "gemm2/x"]).frame
    assert frame["DeepGEMM over ours"].tolist() == ["0.95", ""] and frame["% of bound"].tolist() == ["50", ""]
    assert frame["torch bf16"][0] == "210.0" and frame["torch e4m3, row scales"][0] == ""
    assert frame["ours, with bias"].tolist() == ["100.0", "not recorded yet"]


def test_the_epilogue_fused_and_apart():
    case = moe_times.cases("gemm1", decode=False)[0].removeprefix("gemm1/")
    rows = [row(f"gemm1/{case}", "cuda", 100.0), row(f"swiglu, separate/{case}", "triton", 20.0),
            row(f"gemm1 with swiglu/{case}", "cuda", 102.0)]
    frame = moe_times.epilogue_table(rows).frame
    assert frame.iloc[0].tolist() == [case, "100.0", "20.0", "120.0", "102.0", "15", "recorded"]
    assert "not recorded yet" in str(moe_times.epilogue_table(rows[:2]))


def test_nothing_is_timed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows, about = moe_times.live()
    assert rows == [] and "no GPU" in about
