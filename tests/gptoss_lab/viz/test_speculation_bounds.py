"""Speculation at the bounds: bytes counted by hand, gains at their limits, and the claims of notebook 10."""
import pytest

from gptoss_lab.config import preset
from gptoss_lab.cost import H200
from gptoss_lab.cost.speculation import speedup
from gptoss_lab.viz import speculation_bounds as bounds
from gptoss_lab.viz import speculation_heads as heads

SMALL, BIG = preset("gpt-oss-20b"), preset("gpt-oss-120b")


def test_bytes_of_heads_by_hand():
    assert heads.unembedding_bytes(BIG) == 201088 * 2880 * 2
    assert heads.matrices_bytes(BIG) == 2 * (9 * 2880**2 + 2880)
    layer = (                                                 # one full layer at batch 1, FP8 in blocks of 128
        4 * (5760 * 2880 + 4 * 45 * 23 + 2 * 5760 + 2880 * 2880 + 4 * 23 * 23 + 2 * 2880)          # experts
        + 5120 * 2880 + 4 * 40 * 23 + 2 * 5120 + 2880 * 4096 + 4 * 23 * 32 + 2 * 2880              # projections
        + 128 * 2881 * 2 + 2 * 2880 * 2 + 64 * 2                                                 # router, norms, sinks
        + 8192 * 2048                                                                              # keys and values
    )
    assert heads.layer_bytes(BIG) == pytest.approx(layer + 2 * 2 * 2880**2 + 201088 * 2880 * 2, rel=1e-9)


def test_a_heads_bytes_do_not_grow_with_the_batch_and_a_models_do():
    one, many = (heads.drafts(BIG, SMALL, batch) for batch in (1, 32))
    assert list(one) == ["head, this project's form", "head, a layer", "gpt-oss-20b"]
    assert one["head, this project's form"] == many["head, this project's form"]
    assert many["gpt-oss-20b"] > 6 * one["gpt-oss-20b"]
    frame = heads.heads_table(BIG, SMALL, (1, 32)).frame
    assert frame["ms"].tolist()[2] == f"{1e3 * one['gpt-oss-20b'] / H200.memory_bytes_per_second:.2f}"


def test_the_table_of_bytes():
    frame = bounds.bytes_table(BIG, SMALL, (1, 8, 32)).frame
    fp8 = frame[frame["weights"] == "FP8"]
    assert fp8["draft / step"].tolist() == ["0.73", "0.53", "0.32"]
    assert fp8["check / step"].tolist() == ["3.20", "2.87", "1.48"]
    assert set(frame["origin"]) == {"modelled"}


def test_what_the_notebook_says_of_the_gains():
    """Batch 1 in FP8: not even a perfect draft pays. Batch 32: it does. Shared experts are never worse."""
    for k in bounds.LENGTHS:
        assert speedup(1.0, k, bounds.Case(BIG, SMALL, 1).steps(k)) < 1
        assert speedup(0.9, k, bounds.Case(BIG, SMALL, 32).steps(k)) > 1
        own, shared = (bounds.Case(BIG, SMALL, 8, "packed MXFP4", s).steps(k) for s in (False, True))
        assert shared.verify == own.target < own.verify


def test_the_chosen_point_is_drawn():
    case = bounds.Case(BIG, SMALL, 32, "packed MXFP4")
    fig = bounds.gain_figure(case, 0.8, 2)
    marker = next(trace for trace in fig.data if trace.mode == "markers")
    assert (marker.x[0], marker.y[0]) == (0.8, speedup(0.8, 2, case.steps(2)))
    assert f"{marker.y[0]:.2f} times" in fig.layout.title.text and "batch 32" in fig.layout.title.subtitle.text
    thick = [trace.name for trace in fig.data if trace.line.width == 4]
    assert thick == ["k = 2"]


def test_a_draft_at_its_limit_breaks_even():
    case = bounds.Case(BIG, SMALL, 8, "packed MXFP4")
    fig = bounds.paying_figure(case, (2,))
    gigabytes = fig.data[0].y[45]                                                    # a = 0.9
    steps = case.steps(2)
    seconds = 1e9 * gigabytes / H200.memory_bytes_per_second
    assert speedup(0.9, 2, type(steps)(steps.target, seconds, steps.verify)) == pytest.approx(1)
    assert any("1.3 GB" in note.text for note in fig.layout.annotations)


def test_an_unknown_form_is_refused():
    with pytest.raises(KeyError):
        bounds.Case(BIG, SMALL, form="bf16").steps(1)
