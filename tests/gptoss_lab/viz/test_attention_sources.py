"""The pieces of source are the kernels' own lines, and a piece that is gone is an error."""
import pytest

from gptoss_kernels.attention.flashinfer_variants import FA2_SOURCE, FA3_SOURCE
from gptoss_lab.viz.attention_sources import Piece, excerpt, kernel_source, side_by_side


@pytest.mark.parametrize(("module", "name"), [
    ("triton_prefill", "prefill_kernel"), ("triton_decode", "decode_kernel"), ("triton_decode", "merge_kernel"),
])
def test_the_text_is_the_function_that_runs(module, name):
    triton = pytest.importorskip("triton")
    assert triton
    import importlib
    import inspect

    function = getattr(importlib.import_module(f"gptoss_kernels.attention.{module}"), name).fn
    assert kernel_source(module, name) in inspect.getsource(function)


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match="triton_prefill has no function 'nothing'"):
        kernel_source("triton_prefill", "nothing")
    with pytest.raises(ValueError, match="there is no module gptoss_kernels.attention.nothing"):
        kernel_source("nothing", "prefill_kernel")
    with pytest.raises(ValueError, match="no line has 'x'"):
        excerpt("a\nb", "x", "b")
    with pytest.raises(ValueError, match="no line from 'b' on has 'a'"):
        excerpt("a\nb", "b", "a")


def test_an_excerpt_is_dedented_and_keeps_its_comments_close():
    text = "def f():\n    if x:               # why\n        y = '   # no'\n    return z"
    assert excerpt(text, "if x", "y =") == "if x:  # why\n    y = '   # no'"


def test_the_pieces_that_the_lesson_shows_hold_the_once():
    decode = kernel_source("triton_decode", "decode_kernel")
    assert "m = tl.where(split == 0, sink, m)" in excerpt(decode, "sink = tl.load", "acc = tl.zeros")
    assert "kv_tile_idx != 0" in excerpt(FA2_SOURCE, "REGISTER_M_D_UPDATE", "})")
    assert "sink2 - top" in excerpt(FA3_SOURCE, "void finalize", "row_sum(i) = sink_in_lse")
    start = excerpt(kernel_source("triton_prefill", "prefill_kernel"), "if SINK_FIRST:", "acc = tl.zeros")
    assert start.splitlines()[:2] == ["if SINK_FIRST:", "    m = sink"]


def test_side_by_side_escapes_and_reads_as_text_too():
    shown = side_by_side(Piece("a < b", "x = 1 < 2"), Piece("c", "if (a && b) return;", "cuda"))
    page = shown._repr_html_()
    assert "a &lt; b" in page and "&amp;&amp;" in page and page.count("<pre") == 2
    assert str(shown) == "--- a < b\nx = 1 < 2\n\n--- c\nif (a && b) return;"
