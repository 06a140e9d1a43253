"""Every figure: draws the numbers of its function, is marked with an origin, titled, and labelled on its axes."""
import json

import pytest
import torch
from figure_checks import check_style

from gptoss_lab.config import preset
from gptoss_lab.viz import activation, cache, exponents, hierarchy, routing, sinks, sizes, window, yarn

NANO = preset("nano")
GENERATOR = torch.Generator().manual_seed(3)
IDS = torch.rand(6, 20, 16, generator=GENERATOR).topk(4, dim=-1).indices
WEIGHTS = torch.softmax(torch.randn(6, 20, 4, generator=GENERATOR), -1)
MASS = torch.rand(6, 8, generator=GENERATOR)
EXPONENTS = torch.randint(-12, -2, (128, 4), generator=GENERATOR)
FIGURES = {
    "formats": lambda: sizes.formats_figure([preset("gpt-oss-20b"), preset("gpt-oss-120b")]),
    "treemap": lambda: sizes.treemap_figure(preset("gpt-oss-120b")),
    "map": lambda: hierarchy.figure(preset("gpt-oss-20b")),
    "block": lambda: exponents.block_figure(EXPONENTS, "live", "a block"),
    "codes": exponents.code_figure,
    "yarn": lambda: yarn.figure(NANO.rope, 64),
    "activation": lambda: activation.figure(NANO),
    "window": lambda: window.figure(12, 4),
    "cache": lambda: cache.figure([preset("gpt-oss-20b"), preset("gpt-oss-120b")]),
    "softmax": lambda: sinks.softmax_figure([1, 2, 3, 4], 2.0),
    "mass": lambda: sinks.mass_figure(MASS, [NANO.is_sliding(i) for i in range(6)], "live", "nano"),
    "counts": lambda: routing.counts_figure(IDS, 16, "live", "nano"),
    "path": lambda: routing.path_figure(IDS, WEIGHTS, ["a"] * 20, 2, 16, "live", "nano"),
}
WITHOUT_AXES = ("map", "treemap")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_titled_marked_and_in_the_one_style(name):
    figure = FIGURES[name]()
    check_style(figure)


@pytest.mark.parametrize("name", [n for n in FIGURES if n not in WITHOUT_AXES])
def test_the_axes_are_labelled(name):
    figure = FIGURES[name]()
    for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
        shared = axis.matches is not None and axis.showticklabels is False
        category = axis.title.text is None and name == "formats" and axis.plotly_name.startswith("yaxis")
        assert axis.title.text or shared or category, f"an axis of {name} has no title"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small_and_plain_json(name):
    text = FIGURES[name]().to_json()
    assert len(text) < 60_000
    assert "NaN" not in text and json.loads(text)["data"] or name == "map"


def values(figure, kind, key):
    return [list(getattr(trace, key)) for trace in figure.data if trace.type == kind]


def test_the_bars_are_the_bytes():
    drawn = sum(sum(x) for x in values(FIGURES["formats"](), "bar", "x")) * 2**30
    models = (preset("gpt-oss-20b"), preset("gpt-oss-120b"))
    wanted = sum(sum(sizes.byte_parts(model, f).values()) for model in models for f in sizes.FORMATS)
    assert drawn == pytest.approx(wanted, rel=1e-12)


def test_the_yarn_title_names_the_worst_pair():
    assert "pair 17" in FIGURES["yarn"]().layout.title.text and "76.3 %" in FIGURES["yarn"]().layout.title.text


@pytest.mark.parametrize(("spread", "verdict"), [(14, "all inside"), (15, "not all inside")])
def test_the_block_title_tells_whether_fifteen_suffice(spread, verdict):
    block = torch.zeros(128, 4, dtype=torch.int32)
    block[0, 0] = -spread
    title = exponents.block_figure(block, "live", "x").layout.title.text
    assert f"span {spread + 1}: {verdict} the 15" in title


def test_a_block_is_drawn_from_its_place_in_the_matrix():
    scales = torch.randint(110, 125, (300, 9), dtype=torch.uint8, generator=GENERATOR)
    drawn = torch.tensor(values(exponents.figure_at(scales, 1, 1), "heatmap", "z")[0])
    assert torch.equal(drawn, scales[128:256, 4:8].long() - 127)


def test_the_heatmaps_hold_what_they_are_given():
    assert values(FIGURES["mass"](), "heatmap", "z")[0][2] == pytest.approx((100 * MASS[2]).tolist())
    assert values(FIGURES["counts"](), "heatmap", "z")[0] == routing.expert_counts(IDS, 16).tolist()
    path = torch.tensor(values(FIGURES["path"](), "heatmap", "z")[0])
    assert torch.allclose(path.sum(-1), torch.ones(20), atol=1e-6) and int((path > 0).sum(-1).max()) == 4
