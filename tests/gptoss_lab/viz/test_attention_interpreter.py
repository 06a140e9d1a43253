"""The Triton kernels in a process of their own equal fp64; a process that fails says why."""
import pytest

from gptoss_lab.viz import attention_interpreter


def test_every_case_equals_fp64_and_gives_the_example_row():
    pytest.importorskip("triton")
    rows = attention_interpreter.run()
    assert {(r["form"], r["layer"], r["enters"]) for r in rows} == {
        (form, layer, enters) for form in ("prefill", "decode") for layer in ("full", "window 128")
        for enters in ("before the first key", "after the last key")}
    assert all(0 < r["error"] < attention_interpreter.LARGEST for r in rows)
    assert all(r["example"] == pytest.approx(32.126854, abs=1e-5) for r in rows)
    assert {r["splits"] for r in rows if r["form"] == "decode"} == {1, 5}
    assert attention_interpreter.show(rows).frame["example row"].unique().tolist() == ["32.126854"]
