"""Every committed notebook keeps every rule of tools/rules.py."""
import pytest

from tools import check_notebooks
from tools.notebooks import find

NOTEBOOKS = find([])


def test_there_are_notebooks_and_their_numbers_run_from_00():
    assert len(NOTEBOOKS) >= 4
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{i:02d}" for i in range(len(NOTEBOOKS))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_keeps_every_rule(path):
    assert check_notebooks.check(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_small(path):
    assert path.stat().st_size < 2_000_000
