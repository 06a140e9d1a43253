"""A module's cases in a process of their own: what comes back, and what a failure says."""
import json
import subprocess

import pytest

from gptoss_lab.viz import interpreter


def test_a_failed_process_is_an_error_with_its_last_line(monkeypatch):
    def fail(*args, **kwargs):
        assert kwargs["env"]["TRITON_INTERPRET"] == "1"
        return subprocess.CompletedProcess(args, 1, "", "Traceback\nValueError: no such thing\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(interpreter.InterpreterFailed, match="ended with 1: ValueError: no such thing"):
        interpreter.run_module("any")


def test_the_cases_come_back_as_they_were_printed(monkeypatch):
    rows = [{"form": "prefill", "layer": "full", "splits": 1, "enters": "x", "example": 1.0, "error": 0.5}]
    done = subprocess.CompletedProcess([], 0, json.dumps(rows), "a warning")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert interpreter.run_module("any") == rows


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None)
    assert interpreter.obstacle() == "triton is not installed"
