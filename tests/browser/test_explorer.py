"""Notebook 09 in a real JupyterLab: run all cells, move a slider, and the figure and the text follow.

Needs Chromium. In CI (environment variable CI) its absence is a failure; elsewhere the test is skipped and says so.
Screenshots are kept in build/browser.
"""
import os
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="SKIPPED: the browser test needs playwright (extra 'dev')")

from jupyterlab_live import chromium, lab, page

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "09_cost_and_performance.ipynb"
PICTURES = ROOT / "build" / "browser"
MINUTES = 60_000        # in milliseconds
IDLE = "() => document.querySelector('#jp-main-statusbar')?.textContent.includes('| Idle')"
NONE_WAITING = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('*'))"


@pytest.fixture
def opened(tmp_path):
    """The page with the notebook open, and the list of errors of its console."""
    if chromium() is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium on the PATH: CI has to install the package chromium")
        pytest.skip("SKIPPED LOUDLY: no Chromium on the PATH, so the explorer is not tested in a browser")
    PICTURES.mkdir(parents=True, exist_ok=True)
    errors = []
    with lab(NOTEBOOK, tmp_path) as address, page(errors) as shown:
        shown.goto(address, timeout=2 * MINUTES)
        shown.wait_for_selector(".jp-Notebook .jp-Cell", timeout=MINUTES)
        shown.wait_for_function(IDLE, timeout=2 * MINUTES)
        yield shown, errors
        shown.screenshot(path=PICTURES / "last.png")


def run_all(shown):
    """Run every cell from the menu and wait until the last one has its count."""
    shown.get_by_role("menuitem", name="Run", exact=True).click()
    shown.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    shown.wait_for_selector(".gptoss-cost-explorer", timeout=2 * MINUTES)
    shown.wait_for_function(f"() => ({IDLE})() && ({NONE_WAITING})()", timeout=5 * MINUTES)


def state(shown):
    """(title of the explorer's figure, its text)."""
    title = shown.locator(".gptoss-cost-explorer .gtitle").first.text_content()
    return title, shown.locator(".gptoss-cost-explorer .widget-html-content table").first.inner_text()


def move(shown, label, key):
    """Move the slider of that description by one key press and wait until figure and text have changed."""
    before = state(shown)
    control = shown.locator(".gptoss-cost-explorer .widget-slider", has_text=label)
    control.locator(".noUi-handle").first.focus()
    shown.keyboard.press(key)
    shown.wait_for_function(
        """([title, text]) => {
            const root = document.querySelector('.gptoss-cost-explorer');
            const figure = root.querySelector('.gtitle'), table = root.querySelector('.widget-html-content table');
            return figure && table && figure.textContent !== title && table.innerText !== text;
        }""", arg=list(before), timeout=MINUTES)
    return before, state(shown)


@pytest.mark.timeout(900)
def test_a_moved_slider_changes_the_figure_and_the_text(opened):
    shown, errors = opened
    run_all(shown)
    assert shown.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    explorer = shown.locator(".gptoss-cost-explorer")
    explorer.scroll_into_view_if_needed()
    shown.wait_for_selector(".gptoss-cost-explorer .gtitle", timeout=MINUTES)
    shown.screenshot(path=PICTURES / "explorer_before.png")
    (title, text), (moved_title, moved_text) = move(shown, "batch", "ArrowRight")
    assert "tokens/s per user" in title and "kernels alone" in text
    assert moved_title != title and "tokens/s per user" in moved_title
    assert moved_text != text and moved_text.count("ms") >= 2
    move(shown, "$ per hour", "ArrowRight")
    explorer.scroll_into_view_if_needed()
    shown.screenshot(path=PICTURES / "explorer_after.png")
    assert errors == []
