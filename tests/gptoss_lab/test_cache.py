"""Where cached things lie, and that they are made once."""
import threading
import time

import pytest

from gptoss_lab.cache import cache_folder, fcntl, made_once


def test_the_setting_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_the_platform_decides_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("GPTOSS_LAB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder().is_relative_to(tmp_path) and "gptoss-lab" in cache_folder().parts


@pytest.mark.skipif(fcntl is None, reason="files are locked by flock")
def test_whoever_wants_the_same_meanwhile_waits(tmp_path):
    made, found = [], []

    def make(path):
        made.append(path)
        time.sleep(0.2)
        path.mkdir()

    def want():
        found.append(made_once(tmp_path / "cache" / "copy", make).is_dir())

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [tmp_path / "cache" / "copy"] and found == [True] * 4


def test_what_could_not_be_made_is_tried_again(tmp_path):
    def fail(path):
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        made_once(tmp_path / "copy", fail)
    assert made_once(tmp_path / "copy", lambda path: path.mkdir()).is_dir()


def test_where_no_lock_can_be_made_making_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        made_once(tmp_path / "file" / "copy", lambda path: path.mkdir())
