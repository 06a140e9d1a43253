"""Where cached things lie."""
from gptoss_lab.cache import cache_folder


def test_the_setting_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_the_platform_decides_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("GPTOSS_LAB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder().is_relative_to(tmp_path) and "gptoss-lab" in cache_folder().parts
