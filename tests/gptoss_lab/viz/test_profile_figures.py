"""Rooflines, time lines and tables of the profile: what is drawn is what was given; what is missing is said."""

import pytest
from figure_checks import check_figure

from gptoss_lab.bench.trace import Kernel
from gptoss_lab.bench.tune_launches import CASES, launches
from gptoss_lab.config import preset
from gptoss_lab.results import make_row
from gptoss_lab.viz import (
    profile_kernels,
    profile_left,
    profile_roofline,
    profile_timeline,
    tune_grids,
    tune_times,
)

BIG = preset("gpt-oss-120b")
PROMPT = profile_kernels.prefill(BIG, 8192)
KERNELS = [
    Kernel("_norm_quantise_kernel", 100, 10, (8192, 1, 1), (128, 1, 1)),
    Kernel("grouped_gemm", 110, 50, (132, 1, 1), (384, 1, 1)),
    Kernel("rope_cache_kernel", 165, 15, (1024, 10, 1), (128, 1, 1)),
    Kernel("grouped_gemm", 170, 30, (132, 1, 1), (384, 1, 1)),                 # overlaps the one before
    Kernel("Memcpy DtoD", 220, 5),
]


def attention_row(value=1100.0):
    return make_row("attention", "prefill/full/8192", "gluon", "microseconds", [value], "us", bound=555.9)


def fast_row(value, **more):
    return make_row("prefill", "prefill", "fast, fp8 experts, fp8 projections", "seconds", value, "s", bound=0.048,
                    model="gpt-oss-120b", tokens=8192, batch=1, **more)


@pytest.mark.parametrize("launched", [PROMPT, *(profile_kernels.decode(BIG, n, b) for n, b in (
    (8192, 1), (131072, 1), (8192, 32)))])
def test_names_fit_their_columns_and_stand_apart(launched):
    """No line is wider than its column, and no two labels of a column share a line."""
    figure = profile_roofline.figure({"step": launched}, [])
    names = [note for note in figure.layout.annotations if note.ax is not None]
    assert max(len(line) for note in names for line in note.text.split("<br>")) <= 45
    columns = {}
    for note in names:
        columns.setdefault(note.ax, []).append((note.ay, note.text.count("<br>") + 1))
    for found in columns.values():
        for (low, above), (high, below) in zip(sorted(found)[:-1], sorted(found)[1:], strict=True):
            assert high - low > 0.12 * (above + below) / 2


def tune_rows():
    case = CASES[0]
    return [make_row("profile", case.name, one.name, "microseconds", [t * (2 - one.chosen) for t in (100.0, 101.0)],
                     "us", bound=50.0, chosen=one.chosen) for one in launches(case)]


FIGURES = {
    "roofline": lambda: profile_roofline.figure({"prefill": PROMPT}, [attention_row()]),
    "rooflines": lambda: profile_roofline.figure(
        {f"batch {b}": profile_kernels.decode(BIG, 8192, b) for b in (1, 8, 32)}, [], names=False),
    "timeline": lambda: profile_timeline.figure(KERNELS, "live", "a trace"),
    "useful": lambda: tune_grids.useful_figure(5120),
    "gains": lambda: tune_times.gains_figure(tune_rows()),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_titled_marked_labelled_and_small(name):
    figure = FIGURES[name]()
    check_figure(figure, name not in ("timeline", "gains"))


def test_the_roof():
    assert profile_roofline.ridge("fp8") == pytest.approx(1979 / 4.8) and profile_roofline.ridge("bf16") < 207
    assert profile_roofline.roof(1.0, "fp8") == 4.8e12 and profile_roofline.roof(1e4, "bf16") == 989e12
    assert profile_roofline.roof(100, "fp32") == 67e12


def test_points_reach_what_was_recorded_and_never_guess():
    found = {p.launch.what: p for p in profile_roofline.points(PROMPT, [attention_row(1000.0)])}
    full = found["attention, full"]
    assert full.reached == pytest.approx(full.launch.flop / 1e-3) and full.roof == 989e12
    assert full.reached / full.roof == pytest.approx(full.launch.bound_us / 1000.0)
    assert [p.launch.what for p in found.values() if p.reached is not None] == ["attention, full"]
    assert "embedding" not in found and "place rows" not in found                # nothing is computed there
    assert all(p.intensity * 4.8e12 >= p.roof for p in found.values())


def test_the_figure_draws_the_points_and_says_how_many_are_recorded():
    with_row, without = (profile_roofline.figure({"prefill": PROMPT}, rows) for rows in ([attention_row()], []))
    hollow = [t for t in with_row.data if t.name == "prefill, bound"][0]
    assert len(hollow.x) == len(profile_roofline.points(PROMPT, []))
    filled = [t for t in with_row.data if t.name == "prefill, recorded"][0]
    assert len(filled.x) == 1 and "(1 of 15)" in with_row.layout.title.subtitle.text
    assert not [t for t in without.data if t.name == "prefill, recorded"]
    assert "(0 of 15)" in without.layout.title.subtitle.text
    named = " · ".join(a.text for a in with_row.layout.annotations)
    assert all(p.launch.what.split(", residual")[0] in named for p in profile_roofline.points(PROMPT, []))
    share = profile_roofline.arithmetic_share(PROMPT)
    assert 0.6 < share < 0.75 and f"{share:.0%}" in with_row.layout.title.text
    assert profile_roofline.arithmetic_share(profile_kernels.decode(BIG, 8192, 8)) == 0


def test_the_roofline_table_marks_what_is_missing():
    frame = profile_roofline.roofline_table(PROMPT, [attention_row()]).frame.set_index("launch")
    assert frame.loc["attention, full", "recorded, us"] == "1,100.0"
    assert (frame["recorded, us"] == "not recorded yet").sum() == len(PROMPT) - 1
    assert frame.loc["combine, residual included", "grid"] == "8192 x 1" and frame.loc["head", "grid"] == "torch's"
    assert frame.loc["down product", "limited by"] == "bytes"
    assert frame.loc["gate/up product", "limited by"] == "arithmetic"


def test_stretches_are_launches_and_gaps():
    found = profile_timeline.stretches(KERNELS)
    gaps = [(s.start, s.end) for s in found if s.kind == profile_timeline.GAP]
    assert gaps == [(60, 65), (100, 120)]                                       # the overlap leaves no gap at 80
    assert sum(s.kind != profile_timeline.GAP for s in found) == len(KERNELS) and found[0].start == 0
    cut = profile_timeline.between(found, 50, 20)
    assert [(s.kind, s.start, s.end) for s in cut] == [
        ("e4m3 and MXFP4 products", 50, 60), (profile_timeline.GAP, 60, 65), ("rope and cache", 65, 70)]
    with pytest.raises(ValueError, match="length is 0"):
        profile_timeline.between(found, 0, 0)
    with pytest.raises(ValueError, match="the trace holds no launch"):
        profile_timeline.figure([], "live", "nothing")
    assert profile_timeline.stretches([]) == []


def test_the_time_line_draws_every_stretch():
    figure = profile_timeline.figure(KERNELS, "live", "a trace")
    bars = {trace.y[0]: list(zip(trace.base, trace.x, strict=True)) for trace in figure.data}
    assert bars["e4m3 and MXFP4 products"] == [(10, 50), (70, 30)]
    assert bars["nothing runs"] == [(60, 5), (100, 20)]
    assert "5 launches in 0.1 ms; in 20.0% of it nothing runs" in figure.layout.title.text


def test_tables_of_a_trace():
    kinds = profile_timeline.kinds_table(KERNELS, "live").frame
    assert kinds["kind"].tolist()[0] == "e4m3 and MXFP4 products" and kinds["kind"].tolist()[-1] == "nothing runs"
    assert kinds.iloc[0]["grid"] == "132 x 1 x 1" and kinds.iloc[-1]["us"] == "25"
    names = profile_timeline.names_table(KERNELS, "live", most=2).frame
    assert names["launch"].tolist() == ["grouped_gemm", "rope_cache_kernel"]
    assert names.iloc[0]["us each"] == "40.0" and names.iloc[0]["launches"] == "2"


def test_what_is_left():
    frame = profile_left.left_table(PROMPT, [attention_row(1111.0)]).frame.set_index("launch")
    full = next(one for one in PROMPT if one.what == "attention, full")
    assert frame.loc["attention, full", "recorded, ms"] == f"{18 * 1.111:.3f}"
    assert frame.loc["attention, full", "% of bound"] == f"{100 * full.bound_us / 1111.0:.0f}"
    assert frame.loc["down product", "recorded, ms"] == "no row yet" and frame.loc["down product", "% of bound"] == ""
    assert frame.loc["all launches", "recorded, ms"].startswith("rows for ")
    assert frame.index[0] == "gate/up product"                                  # the longest bound first
    assert all(one.what in profile_left.REASONS or one.kernel in profile_left.REASONS for launches_ in (
        PROMPT, profile_kernels.decode(BIG, 8192, 1), profile_kernels.decode(BIG, 8192, 32)) for one in launches_
        if one.times > 1)


def test_whole_steps_with_and_without_rows():
    wanted = [("prefill", "gpt-oss-120b", 8192, 1), ("decode", "gpt-oss-120b", 8192, 8)]
    rows = [fast_row([0.1], no_kernel_share=0.021),
            make_row("prefill", "plain forward", "reference cuda", "seconds", [1.4], "s", model="gpt-oss-120b",
                     tokens=8192, batch=1)]
    frame = profile_left.steps_table(rows, wanted).frame
    assert frame["recorded, ms"].tolist() == ["100.00", "no row yet"] and frame["% of bound"].tolist() == ["48", ""]
    assert frame["nothing runs, %"].tolist() == ["2.1", ""]
    failed = profile_left.steps_table([fast_row([], failed="does not fit")], wanted[:1]).frame
    assert failed["recorded, ms"].tolist() == ["failed: does not fit"]


def test_recorded_kinds():
    row = make_row("profile", "prefill: attention", "fast", "microseconds", [900.0], "us", model="gpt-oss-120b",
                   launches=36, share=0.25, shapes=[], batch=1)
    assert profile_left.kinds_recorded([row], "gpt-oss-120b", "prefill").frame["us"].tolist() == ["900"]
    for other in (("gpt-oss-20b", "prefill"), ("gpt-oss-120b", "decode"), ("gpt-oss-120b", "prefill", 8)):
        assert profile_left.kinds_recorded([row], *other).frame["kind"].tolist() == ["no row yet"]


def test_recorded_launches():
    shapes = [{"name": "few(int, void*)", "grid": [180, 1, 1], "block": [256, 1, 1], "launches": 36,
               "microseconds": 180.0},
              {"name": "wide", "grid": [320, 1, 1], "block": [256, 1, 1], "launches": 36, "microseconds": 360.0},
              {"name": "Memcpy HtoD", "grid": [], "block": [], "launches": 1, "microseconds": 2.0}]
    row = make_row("profile", "decode: dense products", "fast", "microseconds", [542.0], "us", model="gpt-oss-120b",
                   launches=73, share=0.25, shapes=shapes, batch=8)
    frame = profile_left.shapes_recorded([row], "gpt-oss-120b", "decode", 8).frame
    assert frame["launch"].tolist() == ["wide", "few", "Memcpy HtoD"]
    assert frame["us each"].tolist() == ["10.0", "5.0", "2.0"] and frame["block"].tolist()[:2] == ["256", "256"]
    assert len(profile_left.shapes_recorded([row], "gpt-oss-120b", "decode", 8, most=1).frame) == 1
    assert profile_left.shapes_recorded([row], "gpt-oss-120b", "decode").frame["launch"].tolist() == ["no row yet"]


def test_before_and_after():
    frame = tune_times.launches_table([], CASES).frame
    assert (frame["time, us"] == "not recorded yet").all() and len(frame) == sum(len(launches(c)) for c in CASES)
    frame = tune_times.launches_table(tune_rows(), CASES[:2]).frame
    assert frame["time, us"].tolist()[:2] == ["201.0", "100.5"]
    assert frame["against the chosen"].tolist()[:2] == ["2.000", "1.000"]
    assert "not recorded yet" in set(frame["time, us"])
    assert tune_times.gains([], CASES) == [] and len(tune_times.gains(tune_rows(), CASES)) == 1
    case, gain, spread = tune_times.gains(tune_rows(), CASES)[0]
    assert case == "gate/up product/E128/T8192" and gain == pytest.approx(2) and 0 < spread < 0.02
    with pytest.raises(ValueError, match="no case is recorded both ways"):
        tune_times.gains_figure([])
