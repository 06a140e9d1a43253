"""Two processes that share a cache: what is recorded of them, with processes that only pretend."""
import subprocess

import pytest

from gptoss_lab.bench import jit_cache
from gptoss_lab.results import read_rows


class Pretended:
    """Stands in for `process`: the first process of a folder compiles, a later one does not."""

    def __init__(self, error=1e-3, code=0):
        self.error, self.code, self.folders = error, code, []

    def __call__(self, backend, folder):
        first = folder not in self.folders
        self.folders.append(folder)
        told = f"noise\ngptoss_kernels: compiling m, kept in {folder}/m\n" if first else "noise\n"
        return subprocess.CompletedProcess(backend, self.code, f'{{"seconds": {40.0 if first else 0.5}, '
                                                               f'"error": {self.error}}}\n', told)


def test_both_processes_are_recorded_with_what_they_told(monkeypatch, tmp_path):
    made = Pretended()
    monkeypatch.setattr(jit_cache, "process", made)
    jit_cache.main([str(tmp_path / "rows.jsonl"), "--backends", "xqa", "flashinfer-fa3"])
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(r["backend"], r["value"]) for r in rows] == [("xqa", 40.0), ("xqa", 0.5), ("flashinfer-fa3", 40.0),
                                                         ("flashinfer-fa3", 0.5)]
    assert rows[0]["conditions"]["told"] == "gptoss_kernels: compiling m, kept in CACHE/m"
    assert rows[1]["conditions"]["told"] == "" and rows[1]["conditions"]["limit_seconds"] == 5.0
    assert len(set(made.folders)) == 2                                   # each backend begins with an empty cache


def test_a_wrong_result_or_a_failed_process_is_no_row(monkeypatch, tmp_path):
    monkeypatch.setattr(jit_cache, "process", Pretended(error=0.5))
    with pytest.raises(RuntimeError, match="relative error 5.0e-01"):
        jit_cache.run(tmp_path / "rows.jsonl", ["xqa"])
    monkeypatch.setattr(jit_cache, "process", Pretended(code=1))
    with pytest.raises(RuntimeError, match="xqa: "):
        jit_cache.run(tmp_path / "rows.jsonl", ["xqa"])
    assert not (tmp_path / "rows.jsonl").exists()
