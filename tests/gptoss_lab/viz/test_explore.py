"""A widget calls its pure function with the values of its controls, and leaves a sentence for static readers."""
import ipywidgets
import pytest

from gptoss_lab.viz import explore


@pytest.fixture
def published(monkeypatch):
    out = []
    monkeypatch.setattr(explore, "display", lambda what, raw=False: out.append((what, raw)))
    return out


def test_the_function_is_called_again_when_a_control_moves(published):
    calls = []
    slider = ipywidgets.IntSlider(value=3, min=0, max=9)
    explore.sliders(lambda window: calls.append(window) or window, "What it shows.", window=slider)
    slider.value = 5
    assert calls == [3, 5]


def test_the_published_output_has_the_sentence_beside_the_widget(published):
    explore.sliders(lambda x: x, "A slider over x.", x=ipywidgets.IntSlider(value=1))
    bundle, raw = published[-1]
    assert raw and bundle["text/plain"] == "A slider over x." and bundle[explore.VIEW]["model_id"]


def test_a_widget_without_a_sentence_is_refused(published):
    with pytest.raises(ValueError, match="sentence"):
        explore.sliders(lambda: None, " ")
    assert published == []
