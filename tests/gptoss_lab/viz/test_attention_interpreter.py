"""The Triton kernels in a process of their own equal fp64; a process that fails says why."""
import json
import subprocess

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


def test_a_failed_process_is_an_error_with_its_last_line(monkeypatch):
    def fail(*args, **kwargs):
        assert kwargs["env"]["TRITON_INTERPRET"] == "1"
        return subprocess.CompletedProcess(args, 1, "", "Traceback\nValueError: no such thing\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(attention_interpreter.InterpreterFailed, match="ended with 1: ValueError: no such thing"):
        attention_interpreter.run()


def test_the_cases_come_back_as_they_were_printed(monkeypatch):
    rows = [{"form": "prefill", "layer": "full", "splits": 1, "enters": "x", "example": 1.0, "error": 0.5}]
    done = subprocess.CompletedProcess([], 0, json.dumps(rows), "a warning")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert attention_interpreter.run() == rows


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(attention_interpreter.importlib.util, "find_spec", lambda name: None)
    assert attention_interpreter.obstacle() == "triton is not installed"
